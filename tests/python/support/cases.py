"""The 72 ways to train that are compared with plain torch."""

from support.training import Case

# model, optimizer, precision, checkpointing, clipping, micro-batches, output head, tuning, loop.
# Every two values of two columns meet in some row, but for one pair: fused SGD in bf16 leaves parts of its first
# momentum uninitialized in plain torch, so that two plain runs already differ. LoRA under autocast comes with
# checkpointing only: the bf16 copies of the frozen weights that backward needs would be half of the state.
TABLE = """
    llama   fused    bf16     stored       noclip one        untied full plain
    llama   fused    bf16     nonreentrant clip   one        tied   full plain
    llama   fused    autocast stored       clip   one        untied full trainer
    llama   fused    autocast nonreentrant noclip accumulate tied   full plain
    llama   foreach  fp32     nonreentrant noclip one        tied   full trainer
    llama   foreach  bf16     stored       noclip accumulate tied   lora plain
    llama   single   fp32     nonreentrant noclip one        untied full plain
    llama   single   autocast reentrant    noclip one        untied full trainer
    llama   sgd      fp32     reentrant    clip   accumulate untied full trainer
    llama   sgd      fp32     reentrant    noclip accumulate tied   lora plain
    llama   fusedsgd fp32     stored       clip   one        untied lora plain
    llama   fusedsgd autocast nonreentrant noclip one        untied lora plain
    qwen3   fused    fp32     stored       noclip accumulate tied   full plain
    qwen3   fused    fp32     reentrant    clip   one        tied   lora trainer
    qwen3   fused    fp32     reentrant    noclip accumulate untied lora trainer
    qwen3   fused    bf16     reentrant    noclip one        tied   full plain
    qwen3   foreach  fp32     stored       clip   one        untied full plain
    qwen3   foreach  autocast nonreentrant clip   one        untied full trainer
    qwen3   single   fp32     reentrant    noclip one        tied   full trainer
    qwen3   single   bf16     stored       clip   accumulate tied   lora plain
    qwen3   sgd      bf16     stored       noclip one        tied   lora plain
    qwen3   sgd      bf16     nonreentrant noclip accumulate tied   full plain
    qwen3   fusedsgd fp32     stored       noclip accumulate untied lora plain
    qwen3   fusedsgd autocast reentrant    noclip accumulate tied   full trainer
    gpt2    fused    fp32     reentrant    clip   accumulate tied   full trainer
    gpt2    fused    bf16     nonreentrant noclip one        tied   full trainer
    gpt2    fused    autocast stored       clip   accumulate untied full plain
    gpt2    fused    autocast nonreentrant clip   accumulate tied   lora plain
    gpt2    foreach  fp32     reentrant    noclip one        tied   full plain
    gpt2    foreach  autocast stored       clip   one        tied   full trainer
    gpt2    single   bf16     stored       clip   one        untied full plain
    gpt2    single   bf16     nonreentrant noclip accumulate tied   lora trainer
    gpt2    sgd      bf16     stored       clip   accumulate untied lora trainer
    gpt2    sgd      autocast nonreentrant noclip one        untied full plain
    gpt2    fusedsgd fp32     nonreentrant clip   accumulate tied   full plain
    gpt2    fusedsgd autocast nonreentrant clip   one        untied lora trainer
    gemma   fused    fp32     stored       noclip one        tied   full trainer
    gemma   fused    fp32     reentrant    noclip one        untied full plain
    gemma   fused    autocast nonreentrant noclip accumulate untied lora plain
    gemma   fused    autocast nonreentrant noclip one        tied   lora trainer
    gemma   foreach  fp32     stored       noclip accumulate untied full plain
    gemma   foreach  fp32     nonreentrant clip   accumulate untied lora plain
    gemma   single   bf16     reentrant    clip   accumulate untied full trainer
    gemma   single   bf16     reentrant    clip   one        tied   full plain
    gemma   sgd      fp32     nonreentrant clip   one        tied   full plain
    gemma   sgd      autocast reentrant    clip   one        untied full plain
    gemma   fusedsgd autocast stored       clip   one        tied   full plain
    gemma   fusedsgd autocast reentrant    noclip one        tied   lora plain
    mixtral fused    fp32     nonreentrant clip   accumulate untied full plain
    mixtral fused    fp32     nonreentrant noclip one        tied   lora plain
    mixtral fused    bf16     stored       clip   accumulate tied   full trainer
    mixtral fused    autocast reentrant    clip   one        tied   lora plain
    mixtral foreach  fp32     stored       clip   one        tied   lora plain
    mixtral foreach  bf16     nonreentrant noclip accumulate untied full trainer
    mixtral single   fp32     stored       noclip one        untied full trainer
    mixtral single   bf16     stored       noclip one        tied   full plain
    mixtral sgd      fp32     stored       clip   one        tied   full trainer
    mixtral sgd      autocast nonreentrant clip   accumulate tied   full trainer
    mixtral fusedsgd fp32     stored       noclip one        tied   lora trainer
    mixtral fusedsgd autocast stored       noclip accumulate tied   full plain
    bert    fused    fp32     stored       clip   one        untied lora trainer
    bert    fused    fp32     nonreentrant clip   one        tied   full trainer
    bert    fused    bf16     nonreentrant noclip one        untied lora trainer
    bert    fused    autocast stored       noclip one        tied   full plain
    bert    foreach  fp32     stored       clip   accumulate tied   full plain
    bert    foreach  bf16     reentrant    clip   one        untied full plain
    bert    single   bf16     reentrant    noclip accumulate tied   full plain
    bert    single   autocast reentrant    clip   accumulate tied   lora plain
    bert    sgd      fp32     nonreentrant clip   accumulate tied   lora trainer
    bert    sgd      autocast reentrant    noclip accumulate untied full plain
    bert    fusedsgd fp32     reentrant    noclip one        untied lora plain
    bert    fusedsgd fp32     nonreentrant noclip one        tied   full plain
"""
CASES = [Case.parse(row) for row in TABLE.strip().splitlines()]
NOT_DETERMINISTIC = {("fusedsgd", "bf16")}


def differing(paged: dict[str, str], plain: dict[str, str]) -> list[str]:
    return sorted(name for name in paged.keys() | plain.keys() if paged.get(name) != plain.get(name))

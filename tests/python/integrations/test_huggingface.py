"""What transformers, accelerate and peft do to a wrapped model ends in the same bits as in memory.

Method: tiny models, a budget well below their state, the stock classes, a plain run beside each.
"""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.bits import digest
from support.models import VOCABULARY, state_bytes, tiny_config
from support.paging import assert_bitwise_equal, page_out, reading, reading_nothing
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import torch_offload
from torch_offload import _C
from torch_offload.runtime.process import PROCESS

STEPS = 3
SAVED_STEP = 1


def tiny_model(name: str, *, tied: bool) -> torch.nn.Module:
    """Two layers: these tests are about files and calls, not about sizes."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(name, tied=tied, hidden=64, layers=2)).train()


def wrapped(model, config, *, share: float = 0.4):
    """Wrap with a part of its state as budget."""
    return torch_offload.wrap(model, config=config, ram=int(share * state_bytes(model, moments=2)))


def rows(count: int = 32) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, VOCABULARY, (count, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer_for(model, directory: Path, **options) -> Trainer:
    settings = {
        "output_dir": str(directory),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    callbacks = options.pop("callbacks", None)
    arguments = TrainingArguments(**(settings | options))
    return Trainer(model=model, args=arguments, train_dataset=rows(), eval_dataset=rows(4), callbacks=callbacks)


def weights(model) -> dict[str, str]:
    """Digests: copies would count against the budget."""
    return {name: digest(weight) for name, weight in model.named_parameters()}


def assert_was_paged() -> None:
    report = torch_offload.report()
    assert report.host_peak_bytes <= report.budget_bytes
    assert report.ssd_read_bytes > 0
    assert report.ssd_written_bytes > 0


def test_a_trainer_checkpoint_resumes_to_the_uninterrupted_run(config, tmp_path):
    """Saved half way by a paged run, resumed by a paged run, equal to a plain run in one go; files are equal too."""
    saving = {"save_strategy": "steps", "save_steps": SAVED_STEP}
    plain = tiny_model("llama", tied=True)
    trainer_for(plain, tmp_path / "plain", **saving).train()

    first = wrapped(tiny_model("llama", tied=True), config)
    trainer_for(first, tmp_path / "paged", **saving).train()
    assert_was_paged()
    assert_bitwise_equal(weights(first), weights(plain))
    PROCESS.close_session()
    del first
    saved = [tmp_path / run / f"checkpoint-{SAVED_STEP}" for run in ("plain", "paged")]
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (saved[1] / name).read_bytes() == (saved[0] / name).read_bytes()
    assert_bitwise_equal(*(torch.load(folder / "optimizer.pt") for folder in reversed(saved)))

    second = wrapped(tiny_model("llama", tied=True), config)
    trainer_for(second, tmp_path / "paged").train(resume_from_checkpoint=str(saved[1]))
    assert_was_paged()
    assert_bitwise_equal(weights(second), weights(plain))


def test_save_pretrained_writes_the_same_file_and_loads_again(config, tmp_path):
    """One shard larger than the budget, from a model that is away."""
    plain = tiny_model("qwen3", tied=True)
    plain.save_pretrained(tmp_path / "plain")
    paged = wrapped(tiny_model("qwen3", tied=True), config, share=0.2)
    page_out(paged)
    paged.save_pretrained(tmp_path / "paged")
    assert_was_paged()
    PROCESS.close_session()
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert sorted(path.name for path in (tmp_path / "paged").iterdir()) == names
    for name in names:
        assert (tmp_path / "paged" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "paged", dtype=torch.float32)
    assert_bitwise_equal(weights(again), weights(plain))


def test_a_model_from_pretrained_is_paged_and_trains_equal(config, tmp_path):
    """Its parameters lie in a mapped file until wrap takes them."""
    tiny_model("llama", tied=False).save_pretrained(tmp_path / "model")
    outcomes = []
    for is_paged in (False, True):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        if is_paged:
            wrapped(model, config)
        trainer_for(model, tmp_path / "run").train()
        if is_paged:
            assert_was_paged()
        outcomes.append(weights(model))
    assert_bitwise_equal(outcomes[1], outcomes[0])


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_goes_out_and_comes_back(config, tmp_path, assign):
    """torch.save of the state_dict, load_state_dict in both ways; without assign nothing old is read."""
    source = wrapped(tiny_model("llama", tied=True), config)
    page_out(source)
    torch.save(source.state_dict(), tmp_path / "state.pt")
    content = torch.load(tmp_path / "state.pt")
    assert_bitwise_equal(dict(content), dict(tiny_model("llama", tied=True).state_dict()))
    torch_offload.unwrap(source)

    target = tiny_model("llama", tied=True)
    with torch.no_grad():
        for weight in target.parameters():
            weight.fill_(3)
    wrapped(target, config)
    page_out(target)
    with reading_nothing():
        target.load_state_dict(content, assign=assign)
    assert all(_C.is_managed(weight) for weight in target.parameters())
    page_out(target)
    assert_bitwise_equal(dict(target.state_dict()), dict(content))


def test_generate_gives_the_same_tokens(config):
    """Greedy, from a model that is away before every call."""
    prompt = torch.arange(6)[None]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = tiny_model("llama", tied=True).eval().generate(prompt, **options)
    model = wrapped(tiny_model("llama", tied=True).eval(), config)
    for _ in range(2):
        torch_offload.evict(model)
        with reading(model.lm_head.weight.nbytes):
            assert_bitwise_equal(model.generate(prompt, **options), expected)


def test_evaluation_in_the_loop_changes_nothing(config, tmp_path):
    """Evaluated after every step, with updates still pending: same evaluation losses, same weights."""
    outcomes = []
    for is_paged in (False, True):
        model = tiny_model("gpt2", tied=True)
        if is_paged:
            wrapped(model, config)
        losses = []

        class Recorder(TrainerCallback):
            def on_evaluate(self, *_, metrics, losses=losses, **__):
                losses.append(metrics["eval_loss"].hex())

        trainer_for(model, tmp_path, eval_strategy="steps", eval_steps=1, callbacks=[Recorder()]).train()
        assert len(losses) == STEPS
        if is_paged:
            assert_was_paged()
        outcomes.append([losses, weights(model)])
    assert_bitwise_equal(outcomes[1], outcomes[0])


def adapters() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


@pytest.mark.parametrize("order", ["wrap first", "adapters first"])
def test_lora_never_writes_the_base_again(config, tmp_path, order):
    """Base pages are written once, when they first leave, and dropped clean afterwards; the adapters train equal."""
    plain = get_peft_model(tiny_model("llama", tied=False), adapters(), autocast_adapter_dtype=False)
    trainer_for(plain, tmp_path / "plain").train()
    plain_weights = weights(plain)

    torch.manual_seed(0)
    model = tiny_model("llama", tied=False)
    drawn = torch.get_rng_state()  # before the adapters' above
    if order == "wrap first":
        wrapped(model, config, share=0.2)
    torch.set_rng_state(drawn)
    paged = get_peft_model(model, adapters(), autocast_adapter_dtype=False)
    if order == "adapters first":
        wrapped(paged, config, share=0.5)
    assert all(_C.is_managed(weight) for weight in paged.parameters())
    page_out(paged)
    frozen = [weight for weight in paged.parameters() if not weight.requires_grad]
    adapter_bytes = sum(4096 for weight in paged.parameters() if weight.requires_grad)  # one sector each
    before = torch_offload.report()
    assert before.written_bytes["parameter"] >= sum(weight.nbytes for weight in frozen)

    trainer_for(paged, tmp_path / "paged").train()
    page_out(paged)
    trained = torch_offload.report()
    leaves = trained.evictions - before.evictions
    assert trained.written_bytes["parameter"] - before.written_bytes["parameter"] <= 2 * (STEPS + 1) * adapter_bytes
    assert trained.clean_drops - before.clean_drops > leaves // 2
    for weight in frozen:
        written = torch_offload.report().written_bytes["parameter"]
        weight.sum()
        page_out(weight)
        assert torch_offload.report().written_bytes["parameter"] == written
    assert_bitwise_equal(weights(paged), plain_weights)


def test_adapters_are_saved_and_merged_from_a_paged_model(config, tmp_path):
    """save_pretrained of the adapters, and merge_and_unload into paged base weights."""
    outcomes = []
    for is_paged in (False, True):
        torch.manual_seed(0)
        model = get_peft_model(tiny_model("llama", tied=False), adapters(), autocast_adapter_dtype=False)
        if is_paged:
            wrapped(model, config, share=0.5)
            page_out(model)
        model.save_pretrained(tmp_path / str(is_paged))
        saved = safetensors.torch.load_file(tmp_path / str(is_paged) / "adapter_model.safetensors")
        if is_paged:
            page_out(model)
        outcomes.append([saved, weights(model.merge_and_unload())])
    assert_bitwise_equal(outcomes[1], outcomes[0])
    PROCESS.close_session()
    torch.manual_seed(0)
    again = PeftModel.from_pretrained(tiny_model("llama", tied=False), tmp_path / "True")
    assert_bitwise_equal(weights(again.merge_and_unload()), outcomes[0][1])


def test_resized_embeddings_are_paged(config):
    """New parameters of the resized model are paged and equal."""
    results = []
    for is_paged in (False, True):
        model = tiny_model("llama", tied=True)
        if is_paged:
            wrapped(model, config)
            page_out(model)
        torch.manual_seed(3)
        model.resize_token_embeddings(VOCABULARY + 8, mean_resizing=False)
        results.append(weights(model))
    assert _C.is_managed(model.get_input_embeddings().weight)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert_bitwise_equal(results[1], results[0])

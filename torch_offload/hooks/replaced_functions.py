"""Every function of another package that this one replaces: which, why, until when, and what could make it unnecessary.

:class:`torch_offload.hooks.patches.Patches` replaces nothing that is not listed here. A test keeps
docs/reference/replaced-functions.md equal to this list.
"""

import inspect
import pkgutil
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch_offload.errors import OffloadError


class Until(Enum):
    """When the original function is put back."""

    ENGINE_CLOSES = "the engine closes"
    ENGINE_OF_SHARDS_CLOSES = "the engine closes that pages what `fully_shard` divided"
    ENGINE_OF_GPU_CLOSES = "the engine closes that pages through a GPU"
    CALL_RETURNS = "the call that needed it returns"
    NO_CODED_MODEL = "no model with coded experts is alive"
    NO_REPORT_CALLBACK = "no `ReportCallback` is alive"
    PROCESS_ENDS = "the process that `torch-offload run --optimizer` or `--fit` started ends"


@dataclass(frozen=True)
class ReplacedFunction:
    """One function of another package.

    Attributes:
        owner: The class or module that holds it, as ``package.module`` or ``package.module:Class``.
        name: Of the attribute.
        parameters: Names of its leading parameters, which the replacement relies on; None for a function written in C,
            which has no signature to check.
        reason: Why it is replaced.
        until: When the original is put back.
        alternative: A public API that could replace the replacement, or what such an API would have to offer.
    """

    owner: str
    name: str
    parameters: tuple[str, ...] | None
    reason: str
    until: Until
    alternative: str

    @property
    def path(self) -> str:
        """The dotted name, such as ``torch.Tensor.numpy``."""
        return f"{self.owner.replace(':', '.')}.{self.name}"

    def resolve_owner(self) -> Any:
        """Import and return the class or module that holds the function."""
        return pkgutil.resolve_name(self.owner)

    def check_signature(self) -> None:
        """Compare the function with what the replacement was written for.

        Raises:
            OffloadError: If the function is missing, or its leading parameters have other names.
        """
        function = getattr(self.resolve_owner(), self.name, None)
        expected = "a function" if self.parameters is None else f"({', '.join(self.parameters)}, ...)"
        if not callable(function):
            raise OffloadError(self._mismatch(expected, "nothing by that name"))
        if self.parameters is None:
            return
        try:
            actual = tuple(inspect.signature(function).parameters)
        except ValueError:
            raise OffloadError(self._mismatch(expected, "a function without a signature")) from None
        if actual[: len(self.parameters)] != self.parameters:
            raise OffloadError(self._mismatch(expected, f"({', '.join(actual)})"))

    def _mismatch(self, expected: str, actual: str) -> str:
        package = self.owner.split(".")[0].split(":")[0]
        return (
            f"cannot replace {self.path}: expected {expected}, got {actual}; install a version of {package} that "
            "torch_offload supports (torch-offload doctor lists them)"
        )


_PINNED_SYSTEM_CALL = "A system call that reads an address without memory fails with EFAULT."

TENSOR_NUMPY = ReplacedFunction(
    owner="torch:Tensor",
    name="numpy",
    parameters=None,
    reason="An array outlives the call: its tensor stays in memory as long as the array.",
    until=Until.ENGINE_CLOSES,
    alternative="A hook of torch on exporting a storage.",
)
TENSOR_DLPACK = ReplacedFunction(
    owner="torch:Tensor",
    name="__dlpack__",
    parameters=("self", "stream", "max_version"),
    reason="A capsule outlives the call: its tensor stays in memory as long as the capsule.",
    until=Until.ENGINE_CLOSES,
    alternative="A hook of torch on exporting a storage.",
)
TO_DLPACK = tuple(
    ReplacedFunction(
        owner=owner,
        name="to_dlpack",
        parameters=None,
        reason="As `torch.Tensor.__dlpack__`.",
        until=Until.ENGINE_CLOSES,
        alternative="A hook of torch on exporting a storage.",
    )
    for owner in ("torch", "torch.utils.dlpack")
)
STORAGE_SHARING = tuple(
    ReplacedFunction(
        owner="torch:UntypedStorage",
        name=name,
        parameters=("self",),
        reason="Paged memory cannot be shared with another process: the call raises OffloadError.",
        until=Until.ENGINE_CLOSES,
        alternative="A storage that can refuse to be shared.",
    )
    for name in ("share_memory_", "_share_fd_cpu_", "_share_filename_cpu_")
)
STORAGE_WRITE_FILE = ReplacedFunction(
    owner="torch:UntypedStorage",
    name="_write_file",
    parameters=None,
    reason=f"{_PINNED_SYSTEM_CALL} The storage is pinned while it is written.",
    until=Until.ENGINE_CLOSES,
    alternative="A reader of storages that copies in user space.",
)
STORAGE_ADDRESS = ReplacedFunction(
    owner="torch:UntypedStorage",
    name="data_ptr",
    parameters=None,
    reason="Addresses of paged storages on a GPU are refused, but programs tell storages apart by them: `torch.save`, "
    "safetensors, what looks for tied weights.",
    until=Until.ENGINE_CLOSES,
    alternative="An identity of storages that is no address.",
)
STORAGE_COPY = ReplacedFunction(
    owner="torch:UntypedStorage",
    name="copy_",
    parameters=None,
    reason="It takes bare addresses: both storages are pinned. On the host what does not fit at once faults.",
    until=Until.ENGINE_CLOSES,
    alternative="A dispatched operator for copies of storages.",
)
FILE_WRITER_RECORD = ReplacedFunction(
    owner="torch._C:PyTorchFileWriter",
    name="write_record",
    parameters=None,
    reason=f"{_PINNED_SYSTEM_CALL} `torch.save` writes a storage while it is pinned.",
    until=Until.ENGINE_CLOSES,
    alternative="A reader of storages that copies in user space.",
)
REBUILD_TENSOR = ReplacedFunction(
    owner="torch._utils",
    name="_rebuild_tensor",
    parameters=("storage", "storage_offset", "size", "stride"),
    reason="`torch.load` of a file larger than the budget: what it reads becomes pages.",
    until=Until.ENGINE_CLOSES,
    alternative="A hook of `torch.load` on each tensor.",
)
MODULE_APPLY = ReplacedFunction(
    owner="torch.nn:Module",
    name="_apply",
    parameters=("self", "fn"),
    reason="`to`, `half` and the like may replace parameters: a wrapped module is scanned afterwards.",
    until=Until.ENGINE_CLOSES,
    alternative="A conversion hook of `torch.nn.Module`, such as those for registration.",
)
PARAMETER_DEEPCOPY = ReplacedFunction(
    owner="torch.nn:Parameter",
    name="__deepcopy__",
    parameters=("self", "memo"),
    reason="A copy of a model larger than memory (a reference model) becomes pages as it is made.",
    until=Until.ENGINE_CLOSES,
    alternative="A hook of torch on copying a parameter.",
)
DATA_PARALLEL_START = ReplacedFunction(
    owner="torch.nn.parallel.distributed",
    name="_sync_module_states",
    parameters=("module", "process_group", "broadcast_bucket_size", "src"),
    reason="`DistributedDataParallel` begins with a broadcast in pieces of 250 MB, each pinned and copied: they are of "
    "1 MB, or one tensor.",
    until=Until.ENGINE_CLOSES,
    alternative="The size of the pieces among the arguments of `DistributedDataParallel`.",
)
DATA_PARALLEL_BUCKETS = ReplacedFunction(
    owner="torch.nn.parallel:DistributedDataParallel",
    name="_ddp_init_helper",
    parameters=("self",),
    reason="The buckets in which `DistributedDataParallel` reduces gradients, as large as all of these, become pages.",
    until=Until.ENGINE_CLOSES,
    alternative="An allocator for buckets among the arguments of `DistributedDataParallel`.",
)
DATA_PARALLEL_REBUILT = ReplacedFunction(
    owner="torch.distributed:Reducer",
    name="_rebuild_buckets",
    parameters=None,
    reason="The second forward of `DistributedDataParallel` makes the buckets anew, in the order of the gradients.",
    until=Until.ENGINE_CLOSES,
    alternative="An allocator for buckets among the arguments of `DistributedDataParallel`.",
)
SWAP_TENSORS = ReplacedFunction(
    owner="torch.utils",
    name="swap_tensors",
    parameters=("t1", "t2"),
    reason="It refuses tensors with weak references: those of a wrapped module are dropped, and made again afterwards.",
    until=Until.ENGINE_CLOSES,
    alternative="A `swap_tensors` that leaves weak references with the object, as it does strong ones.",
)
FORBID_SAVED_TENSOR_HOOKS = ReplacedFunction(
    owner="torch._C._autograd",
    name="_saved_tensors_hooks_disable",
    parameters=None,
    reason="`torch.func` in the forward of a module whose activations are paged: the hooks that page them stand aside.",
    until=Until.ENGINE_CLOSES,
    alternative="Transforms of `torch.func` that support hooks on saved tensors.",
)
ALLOW_SAVED_TENSOR_HOOKS = ReplacedFunction(
    owner="torch._C._autograd",
    name="_saved_tensors_hooks_enable",
    parameters=None,
    reason="As `_saved_tensors_hooks_disable`: the hooks come back.",
    until=Until.ENGINE_CLOSES,
    alternative="Transforms of `torch.func` that support hooks on saved tensors.",
)
HIGHER_ORDER_KEYS = ReplacedFunction(
    owner="torch._ops",
    name="_compute_keyset",
    parameters=("args", "kwargs", "non_fallthrough_keys"),
    reason="Higher-order operators find no kernel for the keys of paged tensors; the operators in them do.",
    until=Until.ENGINE_CLOSES,
    alternative="Backend fallbacks for higher-order operators.",
)
COLLECTIVE_WAIT = ReplacedFunction(
    owner="torch._C._distributed_c10d:Work",
    name="wait",
    parameters=None,
    reason="A wait for other ranks is time in which deferred updates run, and is reported as such.",
    until=Until.ENGINE_CLOSES,
    alternative="A hook of torch on waiting for a collective.",
)
SHARDED_PARAMETER = ReplacedFunction(
    owner="torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam",
    name="_init_sharded_param",
    parameters=("self", "param"),
    reason="The shard of a paged parameter is paged as soon as it is made, before the next one takes memory.",
    until=Until.ENGINE_CLOSES,
    alternative="A hook of `fully_shard` on each shard that it makes.",
)
PADDED_PARAMETER = ReplacedFunction(
    owner="torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam",
    name="reset_sharded_param",
    parameters=("self",),
    reason="A paged shard is copied to where all ranks have equally much: the copy is paged before the next is made.",
    until=Until.ENGINE_CLOSES,
    alternative="A hook of `fully_shard` on each shard that it makes.",
)
GATHERED_PARAMETERS = ReplacedFunction(
    owner="torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam",
    name="init_all_gather_outputs",
    parameters=("self", "all_gather_input_numels"),
    reason="Torch frees what it gathered from other ranks and takes it again: no graph may make pages of it.",
    until=Until.ENGINE_OF_SHARDS_CLOSES,
    alternative="A hook of torch on the memory that `fully_shard` gathers into.",
)
RESHARDED_PARAMETERS = ReplacedFunction(
    owner="torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam",
    name="to_sharded_post_forward",
    parameters=("self",),
    reason="What a rank keeps for the backward, where `reshard_after_forward` is a number of ranks, becomes pages.",
    until=Until.ENGINE_OF_SHARDS_CLOSES,
    alternative="A hook of torch on what `fully_shard` keeps from a forward for its backward.",
)
REDUCED_GRADIENTS = ReplacedFunction(
    owner="torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup",
    name="post_backward",
    parameters=("self",),
    reason="Torch keeps what it summed over replicas until the backward ends, beside paged gradients with the same. "
    "Gradients that a later backward reduces become pages.",
    until=Until.ENGINE_OF_SHARDS_CLOSES,
    alternative="Streams of its own for CUDA only: on the CPU the sum is there when the call returns.",
)
GATHERED_STATE = ReplacedFunction(
    owner="torch.distributed._state_dict_utils",
    name="_iterate_state_dict",
    parameters=("iter_object", "sharded_tensor_func", "dtensor_func", "tensor_func"),
    reason="A full state dict has the whole of each divided tensor: it becomes pages before the next is gathered.",
    until=Until.ENGINE_CLOSES,
    alternative="A function among the options of `get_state_dict` that is given each tensor.",
)
OPTIMIZER_LOADED_STATE = ReplacedFunction(
    owner="torch.optim:Optimizer",
    name="_process_value_according_to_param_policy",
    parameters=("param", "value", "param_id", "param_groups", "key"),
    reason="Optimizer states of a checkpoint become pages one by one.",
    until=Until.ENGINE_CLOSES,
    alternative="`register_load_state_dict_post_hook` comes too late: all states are in memory by then.",
)
OPTIMIZER_LOAD = ReplacedFunction(
    owner="torch.optim:Optimizer",
    name="load_state_dict",
    parameters=("self", "state_dict"),
    reason="Loaded states are looked for again in the next steps.",
    until=Until.ENGINE_CLOSES,
    alternative="`register_load_state_dict_post_hook`, which has to be called for each optimizer.",
)
SAFETENSORS_SHARED = ReplacedFunction(
    owner="safetensors.torch",
    name="_filter_shared_not_shared",
    parameters=("tensors", "state_dict"),
    reason="`save_model` compares addresses, which pages of a GPU have while they are pinned; they are meanwhile.",
    until=Until.ENGINE_OF_GPU_CLOSES,
    alternative="A comparison of storages instead of addresses.",
)
SAFETENSORS_COMPLETE = ReplacedFunction(
    owner="safetensors.torch",
    name="_is_complete",
    parameters=("tensor",),
    reason="As `safetensors.torch._filter_shared_not_shared`.",
    until=Until.ENGINE_OF_GPU_CLOSES,
    alternative="A comparison of storages instead of addresses.",
)
SAFETENSORS_POINTERS = ReplacedFunction(
    owner="safetensors.torch",
    name="_flatten_as_ptr",
    parameters=("tensors",),
    reason="The tensors behind the addresses that the writer gets.",
    until=Until.ENGINE_CLOSES,
    alternative="A writer of safetensors that takes tensors one by one.",
)
SAFETENSORS_WRITER = ReplacedFunction(
    owner="safetensors.torch",
    name="serialize_file",
    parameters=("tensor_dict", "filename", "metadata"),
    reason=f"{_PINNED_SYSTEM_CALL} Tensors are brought, appended and released one by one.",
    until=Until.ENGINE_CLOSES,
    alternative="A writer of safetensors that takes tensors one by one.",
)
TRANSFORMERS_DEVICE_MAP = ReplacedFunction(
    owner="transformers.modeling_utils",
    name="_get_device_map",
    parameters=("model", "device_map", "max_memory", "hf_quantizer"),
    reason="`from_pretrained` with a `device_map` would put the whole model into the GPU; its pages are brought there.",
    until=Until.ENGINE_OF_GPU_CLOSES,
    alternative="A hook of `from_pretrained` on where each weight is put.",
)
TRANSFORMERS_DISJOINT = ReplacedFunction(
    owner="transformers.modeling_utils",
    name="_find_disjoint",
    parameters=("tensors", "state_dict"),
    reason="`save_pretrained` compares addresses, which pages of a GPU have while they are pinned; they are meanwhile.",
    until=Until.ENGINE_OF_GPU_CLOSES,
    alternative="A comparison of storages instead of addresses.",
)
TRANSFORMERS_IDENTICAL = ReplacedFunction(
    owner="transformers.modeling_utils",
    name="_find_identical",
    parameters=("tensors", "state_dict"),
    reason="As `transformers.modeling_utils._find_disjoint`.",
    until=Until.ENGINE_OF_GPU_CLOSES,
    alternative="A comparison of storages instead of addresses.",
)
TRANSFORMERS_REVERT = ReplacedFunction(
    owner="transformers.modeling_utils",
    name="revert_weight_conversion",
    parameters=("model", "state_dict"),
    reason="`save_pretrained` takes fused experts apart: the copies become pages.",
    until=Until.ENGINE_CLOSES,
    alternative="A `save_pretrained` that converts and writes one tensor at a time.",
)
TRANSFORMERS_CONVERT = ReplacedFunction(
    owner="transformers.core_model_loading:WeightConverter",
    name="convert",
    parameters=("self",),
    reason="As `revert_weight_conversion`, for each weight.",
    until=Until.CALL_RETURNS,
    alternative="A `save_pretrained` that converts and writes one tensor at a time.",
)
TRANSFORMERS_SAVE = ReplacedFunction(
    owner="transformers:PreTrainedModel",
    name="save_pretrained",
    parameters=("self", "save_directory"),
    reason="The written config.json describes coded experts, however they were made.",
    until=Until.NO_CODED_MODEL,
    alternative="`HfQuantizer` asked by `save_pretrained` for the configuration of a model that it did not load.",
)
CALLBACK_LOG = ReplacedFunction(
    owner="transformers.trainer_callback:CallbackHandler",
    name="on_log",
    parameters=("self", "args", "state", "control", "logs"),
    reason="Figures are put into the logs before the first tracker reads them.",
    until=Until.NO_REPORT_CALLBACK,
    alternative="An order of callbacks that a callback can ask for.",
)
TRAINER_OPTIMIZER = ReplacedFunction(
    owner="transformers.trainer:Trainer",
    name="get_optimizer_cls_and_kwargs",
    parameters=("args", "model"),
    reason="A `Trainer` of a launched script creates `torch_offload.AdamW` in place of `torch.optim.AdamW`.",
    until=Until.PROCESS_ENDS,
    alternative="`optimizer_cls_and_kwargs`, which the script has to give its `Trainer` itself.",
)
TRAINER_INIT = ReplacedFunction(
    owner="transformers.trainer:Trainer",
    name="__init__",
    parameters=("self", "model", "args", "data_collator", "train_dataset"),
    reason="A `Trainer` of a launched script splits its rows as the plan says, before it makes anything of them.",
    until=Until.PROCESS_ENDS,
    alternative="A callback of `Trainer` that may change the arguments before the first data loader.",
)
LORA_CREATE = ReplacedFunction(
    owner="peft.tuners.lora.model:LoraModel",
    name="_create_new_module",
    parameters=("lora_config", "adapter_name", "target"),
    reason="LoRA puts its layer over the products of coded experts.",
    until=Until.NO_CODED_MODEL,
    alternative="`LoraConfig._register_custom_module`, once it is public and independent of the configuration object.",
)
LORA_FORWARD_HOOKS = ReplacedFunction(
    owner="peft.tuners.lora.model:LoraModel",
    name="_enable_peft_forward_hooks",
    parameters=("self",),
    reason="Adapters by row over coded experts would be ignored: they are refused.",
    until=Until.NO_CODED_MODEL,
    alternative="A method of the layer that PEFT asks whether it can choose adapters by row.",
)
LORA_PREPARE = ReplacedFunction(
    owner="peft.tuners.lora.model:LoraModel",
    name="_prepare_model",
    parameters=("self", "peft_config", "model"),
    reason="Adapters for dense experts would fit a part of a coded model: they are refused.",
    until=Until.NO_CODED_MODEL,
    alternative="A check of PEFT that all `target_parameters` were found.",
)
LORA_COMBINE = ReplacedFunction(
    owner="peft.tuners.lora.model:LoraModel",
    name="add_weighted_adapter",
    parameters=("self", "adapters", "weights", "adapter_name", "combination_type"),
    reason="Combinations that would mix the factors of different experts are refused.",
    until=Until.NO_CODED_MODEL,
    alternative="A method of the layer that PEFT asks to combine its adapters.",
)
LORA_HOTSWAP = ReplacedFunction(
    owner="peft.utils.hotswap",
    name="hotswap_adapter_from_state_dict",
    parameters=("model", "state_dict", "adapter_name", "config"),
    reason="A swap for an adapter of another rank would mix the factors of different experts: it is refused.",
    until=Until.NO_CODED_MODEL,
    alternative="A method of the layer that PEFT asks to swap its adapter.",
)

REPLACED_FUNCTIONS: tuple[ReplacedFunction, ...] = (
    TENSOR_NUMPY,
    TENSOR_DLPACK,
    *TO_DLPACK,
    *STORAGE_SHARING,
    STORAGE_WRITE_FILE,
    STORAGE_COPY,
    FILE_WRITER_RECORD,
    REBUILD_TENSOR,
    MODULE_APPLY,
    PARAMETER_DEEPCOPY,
    DATA_PARALLEL_START,
    DATA_PARALLEL_BUCKETS,
    DATA_PARALLEL_REBUILT,
    SWAP_TENSORS,
    FORBID_SAVED_TENSOR_HOOKS,
    ALLOW_SAVED_TENSOR_HOOKS,
    HIGHER_ORDER_KEYS,
    COLLECTIVE_WAIT,
    SHARDED_PARAMETER,
    PADDED_PARAMETER,
    GATHERED_PARAMETERS,
    RESHARDED_PARAMETERS,
    REDUCED_GRADIENTS,
    GATHERED_STATE,
    OPTIMIZER_LOADED_STATE,
    OPTIMIZER_LOAD,
    SAFETENSORS_SHARED,
    SAFETENSORS_COMPLETE,
    SAFETENSORS_POINTERS,
    SAFETENSORS_WRITER,
    TRANSFORMERS_DEVICE_MAP,
    TRANSFORMERS_DISJOINT,
    TRANSFORMERS_IDENTICAL,
    TRANSFORMERS_REVERT,
    TRANSFORMERS_CONVERT,
    TRANSFORMERS_SAVE,
    CALLBACK_LOG,
    TRAINER_OPTIMIZER,
    TRAINER_INIT,
    LORA_CREATE,
    LORA_FORWARD_HOOKS,
    LORA_PREPARE,
    LORA_COMBINE,
    LORA_HOTSWAP,
)


def markdown_table() -> str:
    """Return the list as a table for the reference."""
    rows = [
        f"| `{function.path}` | {function.reason} | {function.until.value} | {function.alternative} |"
        for function in REPLACED_FUNCTIONS
    ]
    return "\n".join(["| function | why | until | what could replace it |", "|---|---|---|---|", *rows]) + "\n"

"""Loads a model by its name, in a dtype that its device computes fast in, and adapters into it."""

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_spec.core.checks import explained
from hf_spec.files import is_path, read_json

logger = logging.getLogger(__name__)

#: Instead of a dtype: the one of :func:`native_dtype`.
NATIVE = "native"
#: A model's folder has one of these, the second one if it is an adapter of PEFT.
CONFIGS = ("config.json", "adapter_config.json")
#: What PEFT and Transformers raise for adapters that are broken or missing.
BROKEN = (OSError, ValueError, RuntimeError, KeyError, TypeError)


@dataclass(frozen=True)
class Adapter:
    """An adapter folder or repository, with the strategy and options stored beside its weights.

    Attributes:
        name: its name on the model.
        changes_model: whether it fine-tunes the base model, so that its baseline is plain decoding
            with the adapter.
    """

    path: str
    name: str
    strategy: str
    options: dict[str, Any]
    changes_model: bool = False


def load_model(
    path: str, dtype: str, device: str | None = None, attn_implementation: str | None = None,
    adapters: Iterable[Adapter] = (), pack: bool = True,
) -> tuple[Any, Any]:  # fmt: skip
    """A causal language model in evaluation mode on its device, with adapters, and its tokenizer; a
    ValueError if something cannot be loaded, or there is no such device.

    Args:
        path: a folder, or a repository on the Hub.
        dtype: name of a dtype, ``auto`` for the checkpoint's, or ``native``.
        device: None for an accelerator if there is one.
        attn_implementation: None for the model's own.
        pack: whether to call :func:`pack_where_it_pays`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_spec.target.packed_weights import pack_where_it_pays

    dtype, device = native_dtype(device) if dtype == NATIVE else dtype, chosen_device(device)
    extra = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with _explained(path):
        target = torch.device(device)
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **extra).to(target)
    load_adapters(model.eval(), adapters)
    if pack:
        pack_where_it_pays(model)
    return model, tokenizer


def load_tokenizer(path: str) -> tuple[Any, Any]:
    """A model's config and its tokenizer; see :func:`load_model`."""
    from transformers import AutoConfig, AutoTokenizer

    with _explained(path):
        return AutoConfig.from_pretrained(path), AutoTokenizer.from_pretrained(path)


def model_without_weights(path: str) -> Any:
    """A causal language model on the meta device, by its config alone, in the checkpoint's dtype; a
    ValueError if there is no such folder or repository on the Hub."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with _explained(path), torch.device("meta"):
        config = AutoConfig.from_pretrained(path)
        return AutoModelForCausalLM.from_config(config, dtype=config.dtype).eval()


@contextmanager
def _explained(path: str) -> Iterator[None]:
    """Within the block, a model is loaded; a ValueError says why it cannot be."""
    from transformers.utils.logging import disable_progress_bar

    check_model(path)
    disable_progress_bar()
    quiet_hub()
    folder = Path(path)
    kinds = OSError, ValueError, RuntimeError, KeyError, ImportError, AssertionError
    with explained(f"cannot load model {path!r}", *kinds):
        if folder.is_dir() and not any((folder / name).is_file() for name in CONFIGS):
            raise ValueError(f"the folder has no {CONFIGS[0]}")
        if (folder / CONFIGS[1]).is_file() and not any(folder.glob("tokenizer*")):
            raise ValueError("it is an adapter without a tokenizer; give its base model")
        yield


def quiet_hub() -> None:
    """Let the Hub's library log errors only: its retries would bury the one line that says what is
    wrong."""
    from huggingface_hub.utils import logging as hub_logging

    hub_logging.set_verbosity_error()


def check_model(path: str) -> None:
    """Raise a ValueError if a model's path is of a folder that is not there. Loads no library."""
    if is_path(path) and not Path(path).is_dir():
        raise ValueError(f"cannot load model {path!r}: there is no such folder")


def chosen_device(device: str | None) -> str:
    """The device, or if it is None an accelerator if there is one."""
    import torch

    if device is not None:
        return device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def native_dtype(device: str | None) -> str:
    """``bfloat16``; on a CPU without instructions for it ``float32``, as the log then says."""
    import torch

    from hf_spec.target.packed_weights import has_instructions

    on_cpu = chosen_device(device).startswith("cpu")
    if not on_cpu or has_instructions(torch.bfloat16) is not False:
        return "bfloat16"
    logger.warning(
        "This CPU has no instructions for bfloat16 (AVX-512 or AMX), in which products of several "
        "tokens take several times as long as in float32: the model runs in float32. "
        "--dtype bfloat16 forces the other."
    )
    return "float32"


def check_adapter(place: str, folder: bool = False) -> None:
    """Raise a ValueError if a place is a folder without an adapter, or one that is not there; with
    ``folder``, a name of a repository is none. Loads no library."""
    path = Path(place)
    if not (path.is_dir() or folder or is_path(place)):
        return  # a repository on the Hub
    with explained(f"cannot read adapter {place!r}", OSError, ValueError):
        if not path.is_dir():
            raise ValueError("there is no such folder")
        if not (path / CONFIGS[1]).is_file():
            model = "; it is a model's: give an adapter's" if (path / CONFIGS[0]).is_file() else ""
            raise ValueError(f"the folder has no {CONFIGS[1]}{model}")
        if not isinstance(read_json(path / CONFIGS[1]).get("peft_type"), str):
            raise ValueError(f"its {CONFIGS[1]} names no peft_type")


def read_adapters(paths: Iterable[str]) -> list[Adapter]:
    """Read the ``SpecConfig`` beside each adapter's weights; a ValueError if one has none, or is
    given twice."""
    paths = list(paths)
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"adapter {path!r} is given twice: leave one of them out")
        check_adapter(path)

    from peft import PeftConfig

    import hf_spec
    from hf_spec.methods.registry import get_method

    quiet_hub()
    adapters = []
    for index, path in enumerate(paths):
        with explained(f"cannot read adapter {path!r}", *BROKEN):
            config = hf_spec.SpecConfig.from_pretrained(path)
            strategy = config.assistant_strategy
            method = get_method(strategy)
            options = method.today(config.assistant_kwargs or {})
            changes: Any = getattr(method.adapter_config, "changes_model", False)
            if not isinstance(changes, bool):  # adapters of this type may do either
                adapter_config: Any = PeftConfig.from_pretrained(path)
                changes = adapter_config.changes_model
        adapters.append(Adapter(path, f"adapter_{index}", strategy, options, bool(changes)))
    return adapters


def load_adapters(model: Any, adapters: Iterable[Adapter]) -> None:
    """Load adapters into ``model`` under their names, and activate all of them, beside a LoRA that
    ``model`` was loaded with; a ValueError names one that cannot be loaded."""
    from hf_spec.adapters.loading import fine_tunes

    names, kept = [], fine_tunes(model)
    for adapter in adapters:
        what = f"cannot load adapter {adapter.path!r}"
        with explained(what, *BROKEN), warnings.catch_warnings():
            # PEFT's, of adapters side by side, which we want.
            warnings.filterwarnings("ignore", "Already found a `peft_config`")
            model.load_adapter(adapter.path, adapter_name=adapter.name)
        names.append(adapter.name)
    if names:
        model.set_adapter([*kept, *names])

"""Hidden states of a frozen base model, kept on disk, so that each sequence runs through it once.

Drafters that read the base's states only (heads, decoders) see the same states in every epoch. They
are written where a training's checkpoints are, and removed with its end. A training that is resumed
reads those of its first part.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_spec.files import replacing
from hf_spec.model.sequences import KEEPER

#: How names of files end.
SUFFIX = ".safetensors"


class KeptStates:
    """States of sequences, each in a file that is named after its tokens and the kind of states.

    Args:
        num_bytes: most bytes of all files; sequences that find no room are computed each time.
        base: identifies the base's weights.
    """

    def __init__(self, folder: Path, num_bytes: int, base: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.base = folder, base
        self.room = num_bytes - sum(one.stat().st_size for one in folder.glob(f"*{SUFFIX}"))

    def __call__(
        self, compute: Callable[[Tensor, Tensor], Sequence[Tensor]], input_ids: Tensor,
        mask: Tensor, kind: Sequence[int],
    ) -> Sequence[Tensor]:  # fmt: skip
        """Tensors ``(batch, seq, ...)``; those of padding may be 0.

        Args:
            compute: gives them for some rows and their mask.
            input_ids, mask: ``(batch, seq)``; the mask is 0 for padding.
            kind: what they are.
        """
        real = mask.bool()
        rows = [ids[own].tolist() for ids, own in zip(input_ids.cpu(), real.cpu())]
        paths = [self._path((self.base, row, list(kind))) for row in rows]
        new = [row for row, path in enumerate(paths) if not path.is_file()]
        computed = dict(zip(new, zip(*compute(input_ids[new], mask[new])))) if new else {}
        whole = []
        for row, path in enumerate(paths):
            if row in computed:
                own = [part[real[row].to(part.device)] for part in computed[row]]  # (tokens, ...)
                self._keep(path, own)
            else:
                found = load_file(path)
                own = [found[name] for name in sorted(found)]
            whole.append([part.to(input_ids.device) for part in own])
        kept = []
        for parts in zip(*whole):
            padded = parts[0].new_zeros(*input_ids.shape, *parts[0].shape[1:])
            padded[real] = torch.cat(parts)
            kept.append(padded)
        return kept

    def _path(self, key: Any) -> Path:
        digest = hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()
        return self.folder / f"{digest}{SUFFIX}"

    def _keep(self, path: Path, parts: Sequence[Tensor]) -> None:
        """Write the states of a sequence, if there is room."""
        size = sum(part.nbytes for part in parts)
        if size <= self.room and not path.exists():
            self.room -= size
            named = {str(at): part.cpu().contiguous() for at, part in enumerate(parts)}
            with replacing(path) as temporary:
                save_file(named, temporary)


@contextmanager
def kept_states(trainer: Any, folder: Path, base: str) -> Iterator[None]:
    """Keep states in the block, a training, if they recur; afterwards they are removed, unless it
    ends with an error. The folder is that of checkpoints; ``base`` as in :class:`KeptStates`."""
    args = trainer.args
    # Where layers are sharded, all processes run the base together.
    if args.num_train_epochs <= 1 or not args.kept_states or trainer.trains_base or trainer.sharded:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    room = min(args.kept_states * 1e9, shutil.disk_usage(folder).free / 2)
    own = folder / f"states-{args.process_index}"
    token = KEEPER.set(KeptStates(own, int(room / args.world_size), base))
    try:
        yield
    finally:
        KEEPER.reset(token)
    trainer.accelerator.wait_for_everyone()
    for one in folder.glob("states-*"):  # before it was resumed there may have been more processes
        shutil.rmtree(one, ignore_errors=True)

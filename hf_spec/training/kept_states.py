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

from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_spec.files import replacing
from hf_spec.model.sequences import KEEPER

#: How names of files end, and what they call the states.
SUFFIX, STATES = ".safetensors", "states"


class KeptStates:
    """States of sequences, each in a file that is named after its tokens and the kind of states.

    Args:
        num_bytes: most bytes of all files; sequences that find no room are computed each time.
        base: identifies the base's weights: files that were written with others are removed.
    """

    def __init__(self, folder: Path, num_bytes: int, base: str):
        mark = folder / "base"
        if folder.is_dir() and not (mark.is_file() and mark.read_text() == base):
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        mark.write_text(base)
        self.folder = folder
        self.room = num_bytes - sum(one.stat().st_size for one in folder.glob(f"*{SUFFIX}"))

    def __call__(
        self, compute: Callable[[Tensor, Tensor], Tensor], input_ids: Tensor, mask: Tensor,
        layers: Sequence[int],
    ) -> Tensor:  # fmt: skip
        """States ``(batch, seq, features)``; those of padding may be 0.

        Args:
            compute: gives them for some rows and their mask.
            input_ids, mask: ``(batch, seq)``; the mask is 0 for padding.
            layers: the kind of the states.
        """
        real = mask.bool().cpu()
        rows = [ids[own].tolist() for ids, own in zip(input_ids.cpu(), real)]
        paths = [self._path(row, layers) for row in rows]
        found = [load_file(path)[STATES] if path.is_file() else None for path in paths]
        new = [row for row, states in enumerate(found) if states is None]
        if new:
            computed = compute(input_ids[new], mask[new])
            for row, states in zip(new, computed):
                self._keep(paths[row], states[real[row].to(states.device)])
            if len(new) == len(paths):
                return computed
        kept = [states for states in found if states is not None]
        whole = kept[0].new_zeros(*input_ids.shape, kept[0].shape[-1])
        for row, states in enumerate(found):
            if states is not None:
                whole[row][real[row]] = states
        whole = whole.to(input_ids.device)
        if new:
            whole[new] = computed.to(whole)
        return whole

    def _path(self, tokens: list[int], layers: Sequence[int]) -> Path:
        key = repr((tokens, list(layers))).encode()
        return self.folder / (hashlib.blake2b(key, digest_size=16).hexdigest() + SUFFIX)

    def _keep(self, path: Path, states: Tensor) -> None:
        """Write the states of a sequence, ``(tokens, features)``, if there is room."""
        if states.nbytes <= self.room and not path.exists():
            self.room -= states.nbytes
            with replacing(path) as temporary:
                save_file({STATES: states.cpu().contiguous()}, temporary)


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
    shutil.rmtree(own, ignore_errors=True)

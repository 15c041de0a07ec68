"""Random sequences of calls of ``generate`` on one model, each compared with plain generation.

``python tests/random_cases.py --sequences 1000 --output sequences.jsonl`` draws a model and then
turns of conversations: strategies with their variants and adapters, a LoRA beside them, dtypes,
batch sizes, sampling, processors, ends, padding as ``torch.cat([out.sequences, new])`` leaves it,
caches that are handed on from call to call, and errors and interrupts in between; modes of PyTorch,
recorded steps beside others, training mode, other numbers of embeddings, and one configuration for
all calls. A ``TreeCache`` must give what plain generation gives without a cache, a ``DynamicCache``
what it gives with its own one that has been through the same calls.
"""

import copy
import pickle
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import multimodal
import torch
from adapter_oracle import randomise
from conftest import EAGER_ONLY, EOS, VOCAB, padded, prompt, ragged
from method_variants import VARIANTS
from peft import LoraConfig
from processors import Criterion, Fails, Failure, Processor
from random_cases import (
    AROUND,
    MODELS,
    PROCESSORS,
    RUNS,
    WARPERS,
    Case,
    append,
    dynamic,
    matching,
    model_of,
    read,
)  # fmt: skip
from replay import RECORDED
from running import needed
from torch import Tensor

from hf_spec.cache.recurrent import stock_states
from hf_spec.methods.registry import methods
from hf_spec.modeling_patches.cache_name import CACHE
from hf_spec.modeling_patches.modules import linear_modules

CALLS = 6
DTYPES = (torch.float32,) * 3 + (torch.float64,)
#: Models that continue no DynamicCache: it tells no length, or the model has a cache of its own.
NO_DYNAMIC = ("mamba", "mamba2", "falcon_mamba")


@dataclass
class Talk:
    """A conversation and its caches.

    Attributes:
        ids, mask: ``(batch, width)`` of the next prompt.
        images: what the first prompt has besides.
        kind: of cache that is handed on: ``"tree"``, ``"dynamic"`` or None.
        ours, plain: the cache of calls with strategies, and a DynamicCache's of those without.
        edited: whether the prompt does not begin with what ``ours`` holds.
    """

    ids: Tensor
    mask: Tensor
    images: dict[str, Tensor] = field(default_factory=dict)
    kind: str | None = None
    ours: Any = None
    plain: Any = None
    edited: bool = False


class Player:
    """Plays a sequence.

    Args:
        seed: what everything is drawn from.

    Attributes:
        events: what was done, call by call.
        results: how often calls were ``exact``, ``refused`` by a ValueError, ``interrupted``, or
            ``invalid`` as plain generation raises.
    """

    def __init__(self, seed: int):
        self.rng = rng = random.Random(seed)
        self.kind = rng.choice(("attention", "attention", "recurrent", "recurrent", "images"))
        self.name = rng.choice(MODELS[self.kind])
        attention = "eager" if self.name in EAGER_ONLY else "sdpa"
        case = Case(seed, seed, self.kind, self.name, attention, "", "", "", [], {})
        self.model = copy.deepcopy(model_of(case))
        self.seed, self.talk = seed, Talk(torch.empty(0), torch.empty(0))
        self.adapters: dict[tuple[str, str], str] = {}
        self.lora = False
        self.config = copy.deepcopy(self.model.generation_config)
        self.unset = copy.deepcopy(vars(self.config))
        self.events: list[str] = [f"{self.kind} {self.name}"]
        self.results: Counter[str] = Counter()

    def play(self) -> None:
        """All calls; raises an AssertionError for wrong tokens, and whatever ours raises."""
        self._begin()
        for number in range(CALLS):
            if number and self.rng.random() < 0.15:
                self._begin()
            if self.rng.random() < 0.15 and not self.talk.images:
                self._fail()
            self._call()

    # -- what changes between calls ----------------------------------------------------------

    def _begin(self) -> None:
        """A new conversation, perhaps in another dtype or with another LoRA."""
        rng = self.rng
        experts = any("expert" in name for name, _ in self.model.named_modules())
        self.model.to(torch.float32 if experts else rng.choice(DTYPES))
        if rng.random() < 0.3:
            self._change_lora()
        if rng.random() < 0.2:
            for module in self.model.modules():
                drops = [key for key in vars(module) if key == "p" or "drop" in key]
                vars(module).update({key: 0.0 for key in drops if vars(module)[key]})
            self.trains = not self.trains
        if self.kind == "attention" and rng.random() < 0.15:
            self.model.resize_token_embeddings(VOCAB + rng.randint(0, 8), mean_resizing=False)
            self.model.generation_config.eos_token_id = None
        size = rng.choice((1, 1, 2, 2, 3, 4))
        seed = rng.randrange(10**6)
        kind = rng.choice(("tree", "tree", "dynamic", "dynamic", None))
        if kind == "dynamic" and self.name in NO_DYNAMIC:
            kind = "tree"
        if kind == "dynamic":
            size = 1
        if self.kind == "images":
            rows = [(rng.randint(1, 2), rng.randint(4, 10)) for _ in range(size)]
            given = multimodal.prompts(self.name, rows, dtype=self.model.dtype)
        else:
            lengths = [rng.randint(3, 16) for _ in range(size)]
            if rng.random() < 0.5:
                lengths = lengths[:1] * size
            given = ragged(tuple(lengths), seed)
        self.talk = Talk(given.pop("input_ids"), given.pop("attention_mask"), given, kind)
        if kind == "dynamic":
            self.talk.ours, self.talk.plain = dynamic(self.model), dynamic(self.model)
        how = "training" if self.trains else ""
        self.events.append(f"begin {kind} {size} rows {self.model.dtype} {how}")

    def _change_lora(self) -> None:
        if not self.lora:
            names = sorted({name.rpartition(".")[2] for name in linear_modules(self.model)})[:3]
            torch.manual_seed(self.seed)
            config = LoraConfig(r=2, target_modules=names, init_lora_weights=False)
            try:
                copy.deepcopy(self.model).add_adapter(config, "lora")
            except ValueError:  # PEFT knows no LoRA of one of the modules, and has wrapped others
                return
            self.model.add_adapter(config, "lora")
            self.lora = True
        self.beside = self.rng.random() < 0.5

    beside = False  # whether the LoRA is active
    trains = False  # whether the model is in training mode
    shared, around = False, ""  # whether and what calls share, see _generate

    def _activate(self, name: str | None, variant: str) -> None:
        """Make the adapter of a strategy active, and the LoRA if it is to be."""
        active = ["lora"] if self.lora and self.beside else []
        if self.lora or self.adapters:
            self.model.enable_adapters()
        if name is not None and methods()[name].needs_adapter:
            if (name, variant) not in self.adapters:
                fields = dict(VARIANTS[name].adapters.get(variant) or {})
                if name == "bita" and self.kind != "attention":
                    fields["prompt_depth"] = "none"
                config = methods()[name].adapter_config(**fields)
                own = f"own{len(self.adapters)}"
                torch.manual_seed(self.seed)
                self.model.add_adapter(config, own)
                self.adapters[name, variant] = own
                self.model.set_adapter(own)
                randomise(self.model, config.type_name)
            active.append(self.adapters[name, variant])
        self.model.train(self.trains)
        if active:
            self.model.set_adapter(active)
        elif self.lora or self.adapters:
            self.model.disable_adapters()

    # -- calls -------------------------------------------------------------------------------

    def _strategy(self) -> tuple[str | None, str, dict[str, Any]]:
        rng = self.rng
        if rng.random() < 0.15:
            return None, "", {}
        name = rng.choice([*methods()])
        variant = rng.choice([variant for owner, variant in RUNS if owner == name])
        drafting = rng.choice(("always",) * 9 + ("auto",))
        options = {**RUNS[name, variant], "drafting": drafting}
        spec = {"assistant_strategy": name, "assistant_kwargs": options, **needed(name)}
        return name, variant, spec

    def _settings(self, name: str | None, variant: str) -> dict[str, Any]:
        rng = self.rng
        settings: dict[str, Any] = {"max_new_tokens": rng.randint(2, 20), "do_sample": False}
        if rng.random() < 0.3:
            settings |= rng.choice(PROCESSORS)
        alone = len(self.talk.ids) == 1 and (name is None or (name, variant) in matching())
        if alone and rng.random() < 0.3:
            settings |= {"do_sample": True, **rng.choice(WARPERS)}
        if rng.random() < 0.5 or "exponential_decay_length_penalty" in settings:
            settings["eos_token_id"] = sorted(rng.sample(range(EOS, VOCAB - 3), rng.randint(1, 8)))
        return settings

    def _generate(
        self, spec: dict[str, Any], own: Any, settings: dict[str, Any], known: int = 0
    ) -> Any:  # fmt: skip
        """Without the first ``known`` tokens of the prompt, which the cache has."""
        settings = {**settings, **spec, "return_dict_in_generate": True}
        if self.shared:  # all calls' configuration, which stays as it is
            config = self.config
            vars(config).update(self.unset)
            vars(config).update({key: settings.pop(key) for key in {*settings} & {*vars(config)}})
            settings["generation_config"], before = config, dict(vars(config))
        talk, own = self.talk, {} if own is None else {CACHE: own}
        given: dict[str, Any] = {"input_ids": talk.ids[:, known:], "attention_mask": talk.mask}
        if self.kind == "images":
            given |= multimodal.token_types(self.model, given["input_ids"])
            seen = talk.kind == "tree" and own or talk.kind == "dynamic" and self._length(own)
            given |= {} if seen else talk.images
        torch.manual_seed(self.seed)
        with AROUND[self.around]():
            out = self.model.generate(**given, **settings, **own)
        assert not self.shared or vars(self.config) == before, "another configuration"
        return out

    @staticmethod
    def _length(own: dict[str, Any]) -> int:
        return own[CACHE].get_seq_length() if own else 0

    def _call(self) -> None:
        talk = self.talk
        name, variant, spec = self._strategy()
        settings = self._settings(name, variant)
        self.shared = self.rng.random() < 0.3
        self.around = self.rng.choice([*AROUND]) if self.rng.random() < 0.3 else ""
        if spec and talk.kind != "dynamic" and self.rng.random() < 0.2:
            spec |= RECORDED
        self.events.append(
            f"{name} {variant} {settings} {list(talk.ids.shape)} mask {_shown(talk.mask)}"
            f" {self.around}{' shared' * self.shared}{' recorded' * ('compile_config' in spec)}"
            f"{' lora' if self.lora and self.beside else ''}"
        )
        try:
            self._activate(name, variant)
        except ValueError as error:
            self._note("refused", error)
            return
        before = copy.deepcopy((talk.plain, talk.ours))
        if self.rng.random() < 0.15:
            talk.ours = pickle.loads(pickle.dumps(talk.ours))
        if name is None and talk.kind == "tree" and (talk.edited or not bool(talk.mask.all())):
            # Plain generation would take the cache's slots for columns and trust its tokens.
            talk.ours = None
        known = self._known(settings)
        dynamic = talk.kind == "dynamic"
        try:
            seen = {**settings, "output_logits": True}
            out = self._generate({}, talk.plain, seen, known * dynamic)
            if not all(bool(logits.isfinite().all()) for logits in out.logits):
                raise FloatingPointError("logits are not finite")  # Bloom's in float64
            wanted = out.sequences
        except Exception as error:
            self._note("invalid", error)
            talk.plain, talk.ours = before
            return
        wanted = torch.cat([talk.ids[:, :known], wanted], 1) if known and dynamic else wanted
        try:
            found = self._generate(spec, talk.ours, settings, known)
        except ValueError as error:
            self._note("refused", error)
            talk.plain = before[0]
            if dynamic:  # and nothing has changed
                check_alike(talk.ours, before[1], torch.ones_like(talk.mask))
            return
        if found.sequences.tolist() != wanted[:, known:].tolist():
            pairs = zip(found.sequences.tolist(), wanted[:, known:].tolist())
            raise AssertionError(f"{[pair for pair in pairs if pair[0] != pair[1]]}")
        self._note("exact")
        if talk.kind == "tree" and name is not None:
            talk.ours = found[CACHE]
        elif talk.kind == "dynamic":
            check_alike(talk.ours, talk.plain, torch.cat([talk.mask, torch.ones_like(wanted)], 1))
        self._go_on(wanted, settings)

    def _known(self, settings: dict[str, Any]) -> int:
        """Of how many tokens of the prompt this call is given the cache alone."""
        talk, plain = self.talk, {"max_new_tokens", "do_sample", "eos_token_id"}
        if talk.ours is None or settings.keys() - plain or self.rng.random() < 0.8:
            return 0
        if talk.kind == "tree" and not (talk.ours.is_uniform and bool(talk.mask.all())):
            return 0
        known = talk.ours.get_seq_length()
        if talk.edited or talk.images or not 0 < known < talk.ids.shape[1]:
            return 0
        self.events[-1] += f" without the first {known}"
        return known

    def _note(self, result: str, error: Exception | None = None) -> None:
        self.results[result] += 1
        self.events[-1] += f" -> {result}{'' if error is None else ': ' + str(error)[:200]}"

    def _fail(self) -> None:
        """A call that ends with an error or interrupt, whose cache goes on."""
        talk, rng = self.talk, self.rng
        name, variant, spec = self._strategy()
        if name is None:
            return
        error = rng.choice((Failure, KeyboardInterrupt, torch.OutOfMemoryError))
        at = rng.randint(1, 8)
        more: dict[str, Any] = rng.choice((
            {"streamer": Fails(at, error)}, {"logits_processor": [Processor(at, error)]},
            {"stopping_criteria": [Criterion(at, error)]},
        ))  # fmt: skip
        settings = {"max_new_tokens": 12, "do_sample": False, **more}
        self.events.append(f"{error.__name__} {[*more]} {at} {name} {variant}")
        if talk.kind == "tree" and talk.ours is None:
            return
        before = copy.deepcopy(talk.ours)
        try:
            self._activate(name, variant)
            self._generate(spec, talk.ours, settings)
        except (Failure, KeyboardInterrupt, torch.OutOfMemoryError) as error:
            self._note("interrupted", error)
        except ValueError as error:
            self._note("refused", error)
            return
        else:
            self._note("finished")
        if talk.kind != "dynamic":
            talk.edited = True  # the cache may be ahead of the prompt
            return
        length, width = talk.ours.get_seq_length(), talk.ids.shape[1]
        if length < width:
            # The next prompt is the same, of which the cache may hold more than before.
            talk.ours = before
            return
        self.events[-1] += f" cache of {length} for {width}"
        given = {"max_new_tokens": length - width + 1, "do_sample": False}
        self._activate(None, "")
        out = self._generate({}, talk.plain, given)
        assert talk.plain.get_seq_length() == length
        self._go_on(out.sequences, {})

    def _go_on(self, sequences: Tensor, settings: dict[str, Any]) -> None:
        """The next prompt: what there is and something new, with one of the masks that users give;
        where no cache counts columns, perhaps edited or with its padding moved to the left."""
        talk, rng = self.talk, self.rng
        talk.edited, width = False, talk.ids.shape[1]
        answers = sequences[:, width:]
        ends = torch.tensor(settings.get("eos_token_id", []), dtype=torch.long)
        ended = torch.isin(answers, ends).long()
        real = (ended.cumsum(-1) - ended == 0).long()  # up to the first end
        if rng.random() < 0.2:
            real = torch.ones_like(real)
        new = prompt(rng.randint(1, 5), len(sequences), seed=rng.randrange(10**6))
        ids = torch.cat([sequences, new], 1)
        mask = torch.cat([talk.mask, real, torch.ones_like(new)], 1)
        if talk.kind != "dynamic" and rng.random() < 0.6:
            rows = [row[keep.bool()].tolist() for row, keep in zip(ids, mask)]
            talk.edited = rng.random() < 0.3 and not talk.images  # whose part cannot be cut
            if talk.edited:
                cut = rng.randint(2, width)
                rows = [row[:cut] + row[-2:] for row in rows]
            ids, mask = padded(rows).values()
        if ids.shape[1] > 80:
            self._begin()
        else:
            talk.ids, talk.mask = ids, mask


def _shown(mask: Tensor) -> str:
    return "full" if bool(mask.all()) else " ".join("".join(map(str, row)) for row in mask.tolist())


def check_alike(one: Any, other: Any, mask: Tensor) -> None:
    """Both caches hold the same, but for what the mask ``(batch, columns)`` hides."""
    length = other.get_seq_length()
    assert one.get_seq_length() == length, f"a cache of {one.get_seq_length()} tokens, not {length}"
    for ours, plain in zip(one.layers, other.layers, strict=True):
        if getattr(plain, "keys", None) is not None:
            real = mask[:, None, :length][:, :, -plain.keys.shape[2] :, None]
            for name in ("keys", "values"):
                _check_close(getattr(ours, name) * real, getattr(plain, name) * real)
    states = dict(stock_states(one.layers))
    for place, state in stock_states(other.layers):
        _check_close(states[place], state)


def _check_close(one: Tensor, other: Tensor) -> None:
    """Up to fp32's rounding in other orders of reduction, some layers deep over a conversation."""
    assert float((one - other).norm() / other.norm().clamp(min=1e-3)) < 1e-3, "another cache"


def run_sequence(seed: int) -> dict[str, Any]:
    """A sequence: ``result`` ``"exact"``, ``"different"`` or ``"raised"``; calls by their results;
    events, and the last error."""
    player, note, result = Player(seed), "", "exact"
    try:
        player.play()
    except AssertionError as error:
        result, note = "different", str(error)
    except Exception as error:
        result, note = "raised", f"{type(error).__name__}: {error}"
    return {
        "sequence": seed, "result": result, "note": note, "kind": player.kind,
        "model": player.name, "calls": dict(player.results), "events": player.events,
    }  # fmt: skip


def main(first: int, count: int, output: Path | None) -> int:
    """Play sequences, but for those in ``output``; print what is wrong, and a summary."""
    known = read(output, "sequence")
    for seed in range(first, first + count):
        if seed in known:
            continue
        known[seed] = found = run_sequence(seed)
        if found["result"] != "exact":
            print("\n  ".join([f"{seed}: {found['result']}: {found['note']}", *found["events"]]))
            print(flush=True)
        append(output, found)
    results = Counter(line["result"] for line in known.values())
    calls: Counter[str] = Counter()
    for line in known.values():
        calls.update(line["calls"])
    print(f"{dict(results)} of {len(known)} sequences; calls: {dict(calls)}")
    return int(results.keys() != {"exact"})

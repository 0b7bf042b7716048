"""A state machine that plays what happens to trainers and engines between syncs, in any order.

After a sync that returned, the engine holds what a fresh stream of everything gives, bit for bit. After one that raised it holds
what it held, or the error says otherwise and the next sync sends everything.
"""

import copy
import os
import warnings
from collections import Counter

import torch
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

import lora_stream
from tests.engine_double import Engine
from tests.models import assert_equal, fill

ADAPTERS = ("default", "other", "third")
CONFIGS = (
    {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    {"target_modules": ["o_proj", "up_proj"]},
    {"target_modules": r".*layers\.1\..*(k|down)_proj", "use_rslora": True},
    {"target_modules": ["gate_proj", "q_proj"], "use_dora": True},
    {"target_modules": ["v_proj"], "trainable_token_indices": [3, 5]},
    {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    {"target_modules": ["k_proj"], "init_lora_weights": "olora"},
)
TRAINER = (
    *("step", "step", "write", "thaw", "freeze", "freeze all", "adapt", "switch", "switch", "delete", "rescale"),
    *("merge", "unload", "wrap", "move", "cast", "assign", "replace"),
)
ENGINE = ("write in engine", "reload", "another sender", "restart", "sleep", "wake up", "generate")
FAILURES = ("engine", "engine, and when restored", "trainer", "interrupt", "not finite", "a call")

# For each engine and model: the arguments of a sync that may differ from one to the next.
HOW = st.fixed_dictionaries(
    {},
    optional={
        "full": st.sampled_from([False] * 9 + [True]),
        "rounding": st.sampled_from(["nearest", "dither"]),
        "seed": st.integers(0, 2),
        "in_place": st.booleans(),
        "base_loaded": st.booleans(),
        "fidelity": st.booleans(),
        "allow_unmoved": st.booleans(),
    },
)
INDEX = st.integers(0, 1000)
# What makes the next sync a full one is rare, because after that nothing of what came before counts.
MODEL = ENGINE_INDEX = st.sampled_from([0] * 9 + [1])


# A failure is looked at as it was found: to shrink one takes longer than to read it.
PHASES = (Phase.generate, Phase.shrink) if "SHRINK" in os.environ else (Phase.generate,)


class Wrapper(nn.Module):
    """As a policy is that holds more than its language model."""

    def __init__(self, llm: nn.Module) -> None:
        super().__init__()
        self.llm = llm


def unwrapped(name: str) -> str:
    return name.removeprefix("llm.")


class Histories(RuleBasedStateMachine):
    """A subclass has engines."""

    trainer_does, engine_suffers, can_fail = TRAINER, ENGINE, FAILURES
    leaves_out: tuple[str, ...] = ()  # arguments of a sync
    wire_dtype = torch.bfloat16

    def make_base(self) -> nn.Module:
        raise NotImplementedError

    def make_engines(self, base: nn.Module) -> list:
        """On the base's checkpoint."""
        raise NotImplementedError

    counts: Counter = Counter()  # of the whole run, to be printed

    @initialize(starts=st.tuples(*[st.sampled_from(["plain", "adapted", "wrapped"])] * 2))
    def start(self, starts) -> None:
        base = self.make_base()
        self.engines = self.make_engines(base)
        self.models: list[nn.Module] = [base, copy.deepcopy(base)]
        self.marked: set[int] = set()  # engines that may hold a mixture
        self.last: tuple[int, int] | None = (
            None  # the engine and the model of the last sync, if nothing has happened since
        )
        for which, kind in enumerate(starts):
            self.begin(which, kind)

    def begin(self, which: int, kind: str) -> None:
        if kind != "plain":
            self._adapt(which, which)
        if kind == "wrapped":
            self._wrap(which, which)

    @rule(which=MODEL, what=INDEX, index=INDEX)
    def trainer(self, which, what, index) -> None:
        what = self.trainer_does[what % len(self.trainer_does)]
        note(what)
        self.happens(what)
        getattr(self, f"_{what.replace(' ', '_')}")(which, index)

    @rule(which=MODEL, what=INDEX, index=INDEX, how=HOW)
    def trainer_and_sync(self, which, what, index, how) -> None:
        self.trainer(which, what, index)
        self.sync(0, which, how)

    @rule(which=MODEL, whats=st.lists(INDEX, min_size=2, max_size=4), index=INDEX, how=HOW)
    def trainer_does_more_and_syncs(self, which, whats, index, how) -> None:
        for what in whats:
            self.trainer(which, what, index)
        self.sync(0, which, how)

    @rule(engine=ENGINE_INDEX, what=INDEX, index=INDEX)
    def engine(self, engine, what, index) -> None:
        what = self.engine_suffers[what % len(self.engine_suffers)]
        note(what)
        self.happens(what)
        getattr(self, f"_{what.replace(' ', '_')}")(self.engines[engine % len(self.engines)], index)

    # What a trainer does. index: which of the things that there are.

    def _step(self, which, index) -> None:
        """An optimizer's, of what trains."""
        through_data, size = index % 2 == 0, [0.05, 1e-6][index // 2 % 2]
        for parameter in self.models[which].parameters():
            if parameter.requires_grad:
                _write(parameter, through_data, size)

    def _write(self, which, index) -> None:
        """Any tensor, frozen or not: BAdam writes its copies so."""
        parameters = list(self.models[which].parameters())
        _write(parameters[index // 2 % len(parameters)], index % 2 == 0, 0.05)

    def _thaw(self, which, index, thaw=True) -> None:
        """One layer at a time, as LISA does; 2 is what lies outside of the layers."""
        layer = index % 3
        for name, parameter in self.models[which].named_parameters():
            if (f"layers.{layer}." in name) if layer < 2 else (".layers." not in name):
                parameter.requires_grad_(thaw)

    def _freeze(self, which, index) -> None:
        self._thaw(which, index, thaw=False)

    def _freeze_all(self, which, index) -> None:
        self.models[which].requires_grad_(False)

    def _adapt(self, which, index) -> None:
        """`get_peft_model` on what has no adapters, otherwise one adapter more."""
        model, config = self.llm(which), LoraConfig(r=3, lora_alpha=7, **CONFIGS[index % len(CONFIGS)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not isinstance(model, PeftModel):
                self.replace(which, get_peft_model(model, config))
            elif free := [name for name in ADAPTERS if name not in model.peft_config]:
                if config.init_lora_weights == "olora":
                    return  # it changes the base, under other adapters
                model.add_adapter(free[0], config)
        fill(self.models[which])

    def _switch(self, which, index) -> None:
        model = self.llm(which)
        if isinstance(model, PeftModel):
            names = sorted(model.peft_config)
            model.set_adapter(names[index % len(names)])

    def _delete(self, which, index) -> None:
        model = self.llm(which)
        if isinstance(model, PeftModel) and len(model.peft_config) > 1:
            name, other, *_ = sorted(model.peft_config, key=lambda name: (ADAPTERS.index(name) + index) % 3)
            if name == model.active_adapter:
                model.set_adapter(other)
            model.delete_adapter(name)

    def _rescale(self, which, index) -> None:
        for module in self.models[which].modules():
            if hasattr(module, "scale_layer"):
                module.scale_layer([0.5, 2.0][index % 2])

    def _merge(self, which, index) -> None:
        self._unload(which, index, merge=True)

    def _unload(self, which, index, merge=False) -> None:
        model = self.llm(which)
        if isinstance(model, PeftModel):
            self.replace(which, model.merge_and_unload() if merge else model.unload())

    def _wrap(self, which, index) -> None:
        model = self.models[which]
        self.models[which] = model.llm if isinstance(model, Wrapper) else Wrapper(model)

    def _move(self, which, index) -> None:
        """As an offload and an onload do."""
        for parameter in self.models[which].parameters():
            parameter.data = parameter.data.clone()

    def _cast(self, which, index) -> None:
        self.models[which].to([torch.float32, torch.bfloat16][index % 2])

    def _assign(self, which, index) -> None:
        """A checkpoint's tensors in the place of the parameters."""
        model = self.models[which]
        flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
        next(module for module in model.modules() if hasattr(module, "tie_weights")).tie_weights()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(flags[name])

    def _replace(self, which, index) -> None:
        linear = [module for module in self.models[which].modules() if type(module) is nn.Linear]
        module = linear[index % len(linear)]
        new = module.weight.detach() + 0.05 * torch.randn_like(module.weight)
        module.weight = nn.Parameter(new, requires_grad=module.weight.requires_grad)

    # What happens to an engine

    def _generate(self, engine, index) -> None:
        engine.generate()

    def _restart(self, engine, index) -> None:
        engine.restart()

    def _sleep(self, engine, index) -> None:
        engine.sleep(1 + index % 2)

    def _wake_up(self, engine, index) -> None:
        engine.wake_up()

    def _reload(self, engine, index) -> None:
        """From disk: another policy of the same base."""
        engine.wake_up()
        engine.reload_another(self.streamed(index % 2))

    def _another_sender(self, engine, index) -> None:
        engine.wake_up()
        engine.receive_another(self.streamed(index % 2))

    def _write_in_engine(self, engine, index) -> None:
        engine.wake_up()
        engine.write_any(index)

    # Syncs

    @rule(engine=ENGINE_INDEX, which=MODEL, how=HOW)
    def sync(self, engine, which, how) -> None:
        engine %= len(self.engines)
        target = self.engines[engine]
        want, how = self.wanted(which, how, target)
        must_be_full = engine in self.marked
        is_quiet = self.last == (engine, which)
        before = target.contents()
        try:
            report = self.synced(which, target, **how)
        except lora_stream.UnmovedError as error:
            assert not how.get("allow_unmoved")
            assert target.is_same(before), "something has changed"
            report = error.report
        except ValueError:
            self.counts["refused"] += 1
            assert want is None or target.is_asleep, "nothing is wrong"
            assert target.is_same(before)
            return
        note(f"sent {report.scope}: {report.line()}")
        self.counts[f"synced {report.scope}"] += 1
        assert want is not None, "a stream of it is refused"
        assert report.scope == "all" or not must_be_full
        assert report.scope == "trained" or not is_quiet or how.get("full")
        assert target.is_serving
        self.marked.discard(engine)
        is_touched = target.assert_holds(want)
        self.last = None if is_touched else (engine, which)

    @rule(engine=ENGINE_INDEX, which=MODEL, how=HOW, failure=INDEX, at=st.integers(0, 40))
    def sync_that_fails(self, engine, which, how, failure, at) -> None:
        engine %= len(self.engines)
        target, model = self.engines[engine], self.models[which]
        failure = self.can_fail[failure % len(self.can_fail)]
        note(f"fails by {failure}")
        want, how = self.wanted(which, how, target)
        before, self.last = target.contents(), None
        parameters = list(model.parameters())
        broken = parameters[at % len(parameters)]
        good, kwargs, seen = broken.detach().clone(), {}, []

        def on_tensor(meta, plan) -> None:
            seen.append(meta)
            if len(seen) == at + 1:
                raise KeyboardInterrupt if failure == "interrupt" else OSError("trainer broke")

        if failure == "not finite":
            broken.data.view(-1)[0] = float("inf")
        elif failure in ("trainer", "interrupt"):
            kwargs["on_tensor"] = on_tensor
        else:
            target.will_fail(failure, at)
        raised: BaseException | None = None
        try:
            self.synced(which, target, **how | {"allow_unmoved": True}, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            raised = error
        finally:
            if failure == "not finite":
                broken.data.copy_(good)
        is_same, text = target.is_same(before), f"{type(raised).__name__}: {raised}"
        target.recover()
        if raised is None:  # there was no such tensor, or no such call
            self.marked.discard(engine)
            if failure != "not finite":
                target.assert_holds(want)
            return
        note(text)
        self.counts[f"failed, {failure}"] += 1
        assert is_same or "old weights" not in text or "restoring" in text, "it does not hold its old weights"
        if not is_same:
            # An interrupt is passed on as it is, and says nothing.
            says_so = "must get a full sync" in text or "holds the new weights" in text
            assert says_so or isinstance(raised, KeyboardInterrupt), "the error does not tell"
            self.marked.add(engine)

    # Helpers

    def happens(self, what: str) -> None:
        self.counts[what] += 1
        self.last = None

    def llm(self, which: int) -> nn.Module:
        model = self.models[which]
        return model.llm if isinstance(model, Wrapper) else model

    def replace(self, which: int, model: nn.Module) -> None:
        if isinstance(self.models[which], Wrapper):
            self.models[which].llm = model
        else:
            self.models[which] = model

    def rename(self, which: int):
        return unwrapped if isinstance(self.models[which], Wrapper) else None

    def streamed(self, which: int, **kwargs) -> dict[str, torch.Tensor]:
        arguments = {"wire_dtype": self.wire_dtype, "rename": self.rename(which)}
        return dict(lora_stream.stream(self.models[which], **arguments, **kwargs))

    def synced(self, which: int, engine, **kwargs) -> lora_stream.SyncReport:
        return lora_stream.sync(
            self.models[which],
            engine.handle,
            rename=self.rename(which),
            deadline_s=20,
            staging_bytes=8 * 4096,  # so that some tensors come in pieces
            **kwargs,
        )

    def wanted(self, which: int, how: dict, target) -> tuple[dict[str, torch.Tensor] | None, dict]:
        """What the engine must hold after a sync, None if it cannot be streamed; and its arguments, as far as they are true."""
        how = {key: value for key, value in how.items() if key not in self.leaves_out}
        if how.get("base_loaded") and not target.holds_base(self.models[which]):
            how = how | {"base_loaded": False}
        try:
            return self.streamed(which, rounding=how.get("rounding", "dither"), seed=how.get("seed", 0)), how
        except ValueError as error:
            note(f"cannot be streamed: {error}")
            return None, how


@torch.no_grad()
def _write(parameter: nn.Parameter, through_data: bool, size: float) -> None:
    written = parameter.data if through_data else parameter
    written += size * torch.randn_like(written)


CALLS = ("describe", "check", "tell", "start", "pause", "finish", "reset", "resume")


class Double:
    """An engine double as the histories see an engine."""

    def __init__(self, checkpoint):
        self.handle = Engine(checkpoint)
        for name in ("generate", "restart", "sleep", "wake_up"):
            setattr(self, name, getattr(self.handle, name))
        self.reload_another = self.handle.reload
        self.receive_another = self.handle.receive

    def write_any(self, index):
        names = sorted(self.handle.weights.places)
        self.handle.write(names[index % len(names)])

    @property
    def is_asleep(self):
        return self.handle.sleep_level > 0

    @property
    def is_serving(self):
        return not self.handle.is_still and not self.handle.is_open and not self.handle.has_prefixes

    def contents(self):
        return self.handle.weights.all()

    def is_same(self, before):
        return all(torch.equal(tensor, before[name]) for name, tensor in self.contents().items())

    def assert_holds(self, want):
        assert_equal(self.contents(), want)

    def holds_base(self, model):
        """Whether a user may say so."""
        contents, base = self.contents(), dict(_base_of(model))
        return all(torch.equal(tensor, base[name].to(torch.bfloat16)) for name, tensor in contents.items())

    def will_fail(self, failure, at):
        if failure == "a call":
            self.handle.fails[CALLS[at % len(CALLS)]] = 1 + at // len(CALLS) % 2
        else:
            self.handle.fail_at.extend([at, 1] if failure.endswith("restored") else [at])

    def recover(self):
        self.handle.fail_at.clear()
        self.handle.fails.clear()
        if self.handle.is_still and not self.handle.is_paused_by_sender:
            self.handle.is_still = False


def _base_of(model):
    """Names and values of what lies under the adapters."""
    for name, tensor in model.state_dict().items():
        if not any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens_")):
            name = name.removeprefix("llm.").removeprefix("base_model.model.")
            for wrapper in (".token_adapter", ".base_layer", ".original_module"):
                name = name.replace(wrapper, "")
            yield name, tensor


def play(machine: type[Histories], num_histories: int, **kwargs) -> None:
    """Prints how often each thing has happened. kwargs: further settings of hypothesis."""
    machine.counts.clear()
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_histories,
            **{"stateful_step_count": 50, **kwargs},
            deadline=None,
            database=None,
            phases=PHASES,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(
        f"{machine.__name__}: {num_histories} histories; "
        + ", ".join(f"{v} {k}" for k, v in sorted(machine.counts.items()))
    )

"""The configuration: one clear line per mistake, documented fields, stored and read back equal, without torch."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from rl.config.load import dumps, loads, parse, validate
from rl.config.run import RunConfig
from rl.errors import ConfigError

ROOT = Path(__file__).parents[2]
PLAIN: dict[str, Any] = {
    "name": "run",
    "model": {"warmstart": {}},
    "domains": [{"name": "lake", "environment": "frozen_lake", "environment_options": {"size": 4, "slip": 1e-05}}],
}


def complaint(**changes: Any) -> list[str]:
    """The lines of the error that a changed tree makes, without the source."""
    with pytest.raises(ConfigError) as caught:
        validate(PLAIN | changes, "run.yaml")
    lines = str(caught.value).split("\n")
    assert all(line.startswith("run.yaml: ") for line in lines)
    return [line.removeprefix("run.yaml: ") for line in lines]


LAKE = PLAIN["domains"][0]
MISTAKES: list[tuple[dict[str, Any], str, str, str]] = [
    # changed tree, field, value or "", mend
    ({"trainig": {"steps": 3}}, "trainig", "{'steps': 3}", "did you mean 'training'?"),
    ({"training": {"stepz": 3}}, "training.stepz", "3", "did you mean 'steps'?"),
    ({"training": {"zzz": 3}}, "training.zzz", "3", "known fields: adam_beta2"),
    ({"domains": [LAKE | {"rewrad": "x"}]}, "domains.0.rewrad", "'x'", "did you mean 'reward'?"),
    ({"domains": [LAKE, LAKE | {"name": "b", "max_turns": 0}]}, "domains.1.max_turns", "0", "greater than or equal"),
    ({"domains": [{"name": "lake"}]}, "domains.0.environment", "", "required field is missing; add it"),
    ({"domains": []}, "domains", "[]", "at least 1 item"),
    ({"domains": {"name": "lake"}}, "domains", "'lake'", "a valid tuple"),
    ({"training": 5}, "training", "5", "a mapping of fields"),
    ({"training": None}, "training", "None", "a mapping of fields"),
    ({"training": {"steps": "many"}}, "training.steps", "'many'", "a valid integer"),
    ({"training": {"learning_rate": 0}}, "training.learning_rate", "0", "greater than 0"),
    ({"deadlines": {"batch": math.inf}}, "deadlines.batch", "inf", "less than or equal to 31536000"),
    ({"deadlines": {"score": 1e10}}, "deadlines.score", "10000000000.0", "less than or equal to 31536000"),
    ({"domains": [LAKE | {"weight": math.inf}]}, "domains.0.weight", "inf", "a finite number"),
    ({"evaluation": {"solved_at": math.nan}}, "evaluation.solved_at", "nan", "a finite number"),
    ({"training": {"loss": "ppo"}}, "training.loss", "'ppo'", "'grpo', 'dr_grpo', 'dapo', 'bnpo' or 'cispo'"),
    ({"staleness": {"mode": ["sync"]}}, "staleness.mode", "['sync']", "'rollart'"),
    ({"staleness": {"alpha": 99}}, "staleness.alpha", "99", "less than or equal to 16"),
    ({"name": "Bad Name"}, "name", "'Bad Name'", "pattern"),
    ({"pools": {"type": "mesos"}}, "pools.type", "'mesos'", "'local', 'scheduler'"),
    ({"pools": {"cpu": 3}}, "pools", "{'cpu': 3}", "`type` is missing; it chooses one of local, scheduler"),
    ({"pools": {"type": "local", "lambda": 0}}, "pools.lambda", "0", "greater than or equal to 1"),
    ({"pools": {"type": "local", "lamda": 1}}, "pools.lamda", "1", "did you mean 'lambda'?"),
    ({"model": {"warmstart": {}, "source": {"type": "tiny", "size": {"layer": 1}}}},
     "model.source.size.layer", "1", "did you mean 'layers'?"),
    ({"model": {"warmstart": {}, "source": {"type": "tiny", "size": {"layers": 0}}}},
     "model.source.size.layers", "0", "greater than or equal to 1"),
    ({"model": {"warmstart": {}, "source": {"type": "tiny", "size": {"hidden_size": 31}}}},
     "model.source.size.hidden_size", "31", "greater than or equal to 32"),
    ({"model": {"warmstart": {}, "lora": {"target_modules": []}}},
     "model.lora.target_modules", "[]", "at least 1 item"),
    ({"model": {"warmstart": {}, "source": "tiny"}}, "model.source", "'tiny'", "a mapping of fields"),
    ({"model": {"warmstart": {}, "lora": {"target_modules": 5}}},
     "model.lora.target_modules", "5", "a valid tuple, or Input should be 'all-linear'"),
    ({"domains": [LAKE | {"environment_options": {"since": {1, 2}}}]},
     "domains.0.environment_options.since", "{1, 2}", "JSON"),
    # whole-tree checks
    ({"domains": [LAKE, LAKE]}, "domains", "'lake'", "give each its own"),
    ({"rollout": {"max_tokens": 100}}, "rollout.max_new_tokens", "256", "raise the latter"),
    ({"model": {}}, "model.warmstart", "missing", "add the section"),
    ({"pools": {"type": "local", "cpu": 2}}, "pools.cpu", "2", "raise it"),
    ({"pools": {"type": "local", "bandwidth_gpu": 0}}, "pools.bandwidth_gpu", "0", "set it to 1"),
    ({"pools": {"type": "local", "compute_gpu": 0}}, "pools.compute_gpu", "0", "set it to 1"),
    ({"engine": {"hardware": "compute_gpu"}}, "pools.compute_gpu", "1 engine and the trainer", "set it to 2"),
    ({"engine": {"instances": {}}}, "engine.instances", "no engine", "set engine.instances.bandwidth_gpu to 1"),
    ({"engine": {"instances": {"bandwidth_gpu": 2}}}, "pools.bandwidth_gpu", "2 engines", "set it to 2"),
    ({"pools": {"type": "slurm", "host": "h", "jobs": 1, "shared": "/s"},
      "engine": {"instances": {"bandwidth_gpu": 2}}}, "pools.here.bandwidth_gpu + pools.jobs", "(1)",
     "2 engines run there; set it to 2"),
    ({"pools": {"type": "ssh", "host": "h", "machines": [{"host": "m"}], "here": {"compute_gpu": 0}},
      "engine": {"instances": {"bandwidth_gpu": 1}}}, "pools.here.compute_gpu", "0", "set it to 1"),
    ({"domains": [LAKE | {"concurrency": 3}], "staleness": {"mode": "sync"}},
     "domains.0.concurrency", "(3, of 'lake')", "choose sync_plus"),
    ({"engine": {"instances": {"bandwidth_gpu": 1}}, "deterministic": True},
     "engine", "(hf)", "deterministic to false"),
    ({"engine": {"type": "vllm", "disaggregation": {}}}, "engine.instances.compute_gpu", "0", "set it to 1"),
    ({"engine": {"type": "vllm", "disaggregation": {"prefill": "bandwidth_gpu"}}}, "engine.disaggregation",
     "bandwidth_gpu", "name two classes"),
    ({"engine": {"type": "sglang"}}, "engine.type", "'sglang'", "'hf', 'vllm'"),
    ({"engine": {"max_length": 99}}, "engine.max_length", "99", "set engine.type"),
    ({"engine": {"max_bach": 3}}, "engine.max_bach", "3", "did you mean 'max_batch'?"),
    ({"training": {"processes": 7}}, "training.processes", "7", "choose a divisor"),
    ({"training": {"examine_factor": 2}, "deterministic": True}, "training.examine_factor", "2", "set it to 1"),
    ({"training": {"advantage": "ppo"}}, "training.advantage", "'ppo'", "module:attribute"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "field", "value", "mend"), MISTAKES, ids=[f"{m[1]}-{m[2][:12]}" for m in MISTAKES])
def test_every_mistake_is_one_line_with_field_value_and_mend(
    changes: dict[str, Any], field: str, value: str, mend: str
) -> None:
    lines = complaint(**changes)
    assert len(lines) == 1, lines
    assert lines[0].startswith(field)
    assert value in lines[0] and mend in lines[0], lines[0]


def test_independent_mistakes_are_all_told_at_once() -> None:
    lines = complaint(seed="x", training={"steps": 0, "losss": "a"}, domains=[{"name": "lake", "foo": 1}])
    starts = {line.split(":")[0] for line in lines}
    assert starts == {"seed", "training.steps", "training.losss", "domains.0.environment", "domains.0.foo"}
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("text", "part"),
    [("", "NoneType"), ("- a", "list"), ("a: [1", "not YAML"), ("a: b: c", "not YAML"), ("3: 4\nname: a", "strings"),
     ("name: 2024-13-45", "not YAML: month must be"), ("seed: !!int many", "not YAML: invalid"),
     ("name: " + "[" * 3000, "not YAML: maximum recursion")],
)  # fmt: skip
def test_text_that_is_no_configuration_is_one_error(text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part) as caught:
        parse(text, "run.yaml")
    assert all(line.startswith("run.yaml: ") for line in str(caught.value).split("\n"))


def test_a_long_value_is_shortened() -> None:
    (line,) = complaint(seed=["x" * 1000] * 50)
    assert len(line) < 250


TEXT = """
name: run
model: {warmstart: {}}
domains:
  - {name: lake, environment: frozen_lake}
  - {name: math, environment: calculator, weight: 2}
"""


def test_overrides_reach_lists_and_sections_that_are_not_there() -> None:
    config = parse(
        TEXT, "run.yaml", {"domains.1.weight": 3.5, "training.steps": 7, "pools.type": "local", "pools.lambda": 2}
    )
    assert [d.weight for d in config.domains] == [1.0, 3.5]
    assert config.training.steps == 7
    assert config.pools.lambda_ == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "path", ["domains.2.weight", "domains.x.weight", "domains.-1", "name.first", "domains.0.name.x"]
)
def test_an_override_of_what_is_not_there_is_named(path: str) -> None:
    with pytest.raises(ConfigError, match=f"--set {path}"):
        parse(TEXT, "run.yaml", {path: 1})


@given(
    st.fixed_dictionaries(
        {"name": st.just("run"), "model": st.just({"warmstart": {}}), "seed": st.integers()},
        optional={
            "pools": st.builds(lambda n: {"type": "local", "lambda": n}, st.integers(1, 99)),
            "staleness": st.builds(lambda n: {"alpha": n}, st.integers(0, 16)),
            "training": st.builds(lambda x: {"learning_rate": x}, st.floats(1e-12, 1, exclude_min=True)),
        },
    ),
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3), max_leaves=4,
        ),
        max_size=3,
    ),
)  # fmt: skip
def test_a_resolved_configuration_reads_back_equal(tree: dict[str, Any], options: dict[str, Any]) -> None:
    domain = {"name": "lake", "environment": "frozen_lake", "environment_options": options}
    config = validate(tree | {"domains": [domain]}, "run.yaml")
    assert loads(dumps(config)) == config
    assert dumps(loads(dumps(config))) == dumps(config)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"name": 3}'])
def test_a_damaged_stored_configuration_is_a_named_error(text: str) -> None:
    with pytest.raises(ConfigError, match="stored configuration"):
        loads(text)


def sections(model: type[BaseModel] = RunConfig) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for inner in models_in(field.annotation):
            yield from sections(inner)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]


@pytest.mark.parametrize("section", sorted(set(sections()), key=lambda s: s.__name__), ids=lambda s: s.__name__)
def test_every_section_and_field_is_documented_and_refuses_unknown_fields(section: type[BaseModel]) -> None:
    assert section.__doc__ and "__doc__" in vars(section)
    assert section.model_config["extra"] == "forbid" and section.model_config["frozen"]
    for name, field in section.model_fields.items():
        documented = field.description or name == "type" or models_in(field.annotation)
        assert documented, f"{section.__name__}.{name} has no docstring"


def test_the_configuration_and_the_domain_load_without_torch() -> None:
    code = (
        "import sys, pkgutil, importlib, rl\n"
        "for m in pkgutil.walk_packages(rl.__path__, 'rl.'): importlib.import_module(m.name)\n"
        "heavy = {'torch', 'numpy', 'transformers', 'mlflow', 'dask', 'prefect', 'boto3'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

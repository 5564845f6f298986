"""A trajectory as a trace: its turns as spans, with what was said in each, over OpenTelemetry's protocol.

    trajectory 12.0/3            opening -> the last message; rewards, versions, tokens
      reset
      generate, environment      turn by turn: what the policy wrote, what the environment answered
      score

MLflow's server takes such traces at `/v1/traces`; so does any collector of OpenTelemetry.

Invariants: a pure function of the trajectory; ids are made from what names it, so that sending it twice is one trace;
which trajectories are traced (`sampled`) depends on their problem alone, so that runs can be compared. Only
trajectories of several turns are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtelSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status as OtelStatus

from rl.config.run import RunConfig
from rl.trajectory import Group, Message, Problem, Span, Trajectory

KINDS = {"generate": "LLM", "environment": "TOOL", "reset": "TASK", "score": "EVALUATOR"}
LONGEST = 20_000
"""Characters of one message."""


def sampled(problem: Problem, share: float) -> bool:
    """Whether a problem is among the `share` of which a trajectory is traced."""
    digest = hashlib.sha256(f"{problem.domain}/{problem.seed}/{problem.ordinal}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def of_several_turns(group: Group) -> Trajectory | None:
    """The member that stands for its group: the first one with several turns, if any."""
    return next((m for m in group.members if m.turns > 1), None)


def request(config: RunConfig, trajectory: Trajectory) -> bytes:
    """The body that tells of one trajectory."""
    name = f"{config.tenant}/{config.name} {trajectory.uid}/{trajectory.member}"
    trace_id = hashlib.sha256(name.encode()).digest()[:16]
    root_id = _span_id(name, -1)
    opening, turns = _turns(trajectory.messages)
    spans = sorted((s for s in trajectory.spans if s.stage in KINDS), key=lambda s: s.start)
    begin = min((s.start for s in spans), default=0.0)
    end = max((s.end for s in spans), default=begin)
    root = _span(
        trace_id,
        root_id,
        Span(f"trajectory {trajectory.uid}/{trajectory.member}", begin, end),
        "AGENT",
        inputs=[_said(m) for m in opening],
        outputs={
            "reward": trajectory.reward,
            "rewards": dict(trajectory.rewards),
            "status": trajectory.status.value,
            "last": _said(trajectory.messages[-1]) if trajectory.messages else None,
        },
        run=config.prefix.rstrip("/"),
        uid=str(trajectory.uid),
        member=trajectory.member,
        domain=trajectory.problem.domain,
        versions=sorted({v for v in trajectory.versions if v >= 0}),
        tokens=trajectory.generated_tokens,
        turns=trajectory.turns,
    )
    body = ExportTraceServiceRequest()
    scope = body.resource_spans.add().scope_spans.add()
    scope.spans.append(root)
    counts = dict.fromkeys(KINDS, 0)
    for at, span in enumerate(spans):
        turn = counts[span.stage]
        counts[span.stage] += 1
        asked, answered = _exchange(span.stage, turn, opening, turns, trajectory)
        child = _span(trace_id, _span_id(name, at), span, KINDS[span.stage], asked, answered)
        child.parent_span_id = root_id
        scope.spans.append(child)
    return body.SerializeToString()


def _turns(messages: Sequence[Message]) -> tuple[list[Message], list[tuple[Message, Message | None]]]:
    """The opening, and for each turn what the policy wrote with what it was answered."""
    first = next((at for at, m in enumerate(messages) if m.role == "assistant"), len(messages))
    turns: list[tuple[Message, Message | None]] = []
    for message in messages[first:]:
        if message.role == "assistant":
            turns.append((message, None))
        elif turns and turns[-1][1] is None:
            turns[-1] = (turns[-1][0], message)
    return list(messages[:first]), turns


def _exchange(
    stage: str,
    turn: int,
    opening: list[Message],
    turns: list[tuple[Message, Message | None]],
    trajectory: Trajectory,
) -> tuple[Any, Any]:
    """What went into a span and what came out."""
    if stage == "score":
        return None, dict(trajectory.rewards)
    if stage == "reset" or turn >= len(turns):
        return None, None
    wrote, answer = turns[turn]
    if stage == "environment":
        return _said(wrote), None if answer is None else _said(answer)
    before = opening if turn == 0 else [m for m in (turns[turn - 1][1],) if m is not None]
    return [_said(m) for m in before], _said(wrote)


def _said(message: Message) -> dict[str, str]:
    return {"role": message.role, "content": message.content[:LONGEST]}


def _span(trace_id: bytes, span_id: bytes, span: Span, kind: str, inputs: Any, outputs: Any, **more: Any) -> OtelSpan:
    values = {"mlflow.spanType": kind, "mlflow.spanInputs": inputs, "mlflow.spanOutputs": outputs}
    values |= {f"rollmill.{name}": value for name, value in more.items()}
    return OtelSpan(
        trace_id=trace_id,
        span_id=span_id,
        name=span.stage,
        kind=OtelSpan.SpanKind.SPAN_KIND_INTERNAL,
        start_time_unix_nano=int(span.start * 1e9),
        end_time_unix_nano=int(max(span.end, span.start) * 1e9),
        attributes=[KeyValue(key=key, value=_any(value)) for key, value in values.items() if value is not None],
        status=OtelStatus(code=OtelStatus.StatusCode.STATUS_CODE_OK),
    )


def _any(value: Any) -> AnyValue:
    """A value of JSON's kinds as the protocol's."""
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, dict):
        pairs = [KeyValue(key=str(k), value=_any(v)) for k, v in value.items() if v is not None]
        return AnyValue(kvlist_value=KeyValueList(values=pairs))
    if isinstance(value, list | tuple):
        return AnyValue(array_value=ArrayValue(values=[_any(v) for v in value]))
    return AnyValue(string_value=str(value))


def _span_id(name: str, at: int) -> bytes:
    return hashlib.sha256(f"{name}/{at}".encode()).digest()[:8]

"""Small valid values that tests start from."""

from p2p_dtfm.core.messages.prepared import Prepared, Statement, sign_prepared
from p2p_dtfm.core.protocol.records import (
    PROTOCOL_VERSION,
    Device,
    Intent,
    LayerTiming,
    Link,
    PeerRecord,
    Reachability,
)
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import workload_of

GIB = 1 << 30


def run_spec(**changes: object) -> RunSpec:
    values: dict[str, object] = {
        "name": "test",
        "seed": 7,
        "total_steps": 20,
        "model": {"layers": 4, "width": 32, "heads": 2, "context": 32, "vocabulary": 256},
        "batch": {"global_batch": 8, "microbatch": 2},
        "optimizer": {"peak_learning_rate": 3e-3, "warmup_steps": 2},
        "evaluation": {"every_steps": 10, "sequences": 4},
    }
    return RunSpec.model_validate(values | changes)


def stated(prepared: Prepared) -> Statement:
    """A stated message for tests in which nobody looks at the signature."""
    return Statement(prepared, sign_prepared(prepared, lambda payload: b""))


WORKLOAD = workload_of(run_spec())


def device(speed: int = 1, memory_bytes: int = 8 * GIB) -> Device:
    def timing(base_ns: int) -> LayerTiming:
        return LayerTiming(base_ns // speed, 2 * base_ns // speed)

    return Device(
        kind="cpu",
        name="test device",
        memory_bytes=memory_bytes,
        embedding=timing(100_000),
        block=timing(2_000_000),
        head=timing(1_000_000),
    )


def record(
    peer_id: str,
    *,
    sequence: int = 1,
    life: int = 1,
    links: dict[str, Link] | None = None,
    **changes: object,
) -> PeerRecord:
    values: dict[str, object] = {
        "protocol_version": PROTOCOL_VERSION,
        "run_digest": run_spec().digest(),
        "device": device(),
        "uplink_bytes_per_s": 0,
        "downlink_bytes_per_s": 0,
        "addresses": (f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id}",),
        "reachability": Reachability.DIRECT,
        "intent": Intent.TRAIN,
    }
    return PeerRecord(
        peer_id=peer_id,
        life=life,
        sequence=sequence,
        links=links or {},
        **(values | changes),  # type: ignore[arg-type]
    )

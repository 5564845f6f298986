"""What Rollmill adds to vLLM. Loaded in every process of a server, so nothing heavy is imported before it is used."""

BACKEND = "rollmill_files"


def register() -> None:
    """Make the weight-transfer back end known; idempotent, for vLLM calls it once per process and sometimes twice."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if BACKEND not in Factory._registry:
        Factory.register_engine(BACKEND, "rollmill_vllm.weights", "FileWeights")

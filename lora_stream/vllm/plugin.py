"""The `vllm.general_plugins` entry point: runs once in every vLLM process."""


def register() -> None:
    """Register both sides of the `lora_stream` backend; safe to call again. A trainer that uses vLLM's trainer factory and
    makes no engine calls it itself."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
    from vllm.platforms import current_platform

    # A second register_engine of one name raises, and vLLM would only log that.
    if "lora_stream" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("lora_stream", "lora_stream.vllm.worker", "LoraStreamEngine")
    if "lora_stream" not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(
            "lora_stream", "lora_stream.vllm.trainer", "LoraStreamTrainerEngine"
        )
    if current_platform.is_cpu():
        import torch

        # On processors with AMX the bfloat16 attention uses its tiles, which Linux lets a process use only after it has
        # asked. vLLM does not ask, and dies by SIGILL on a short batch.
        torch.cpu._init_amx()

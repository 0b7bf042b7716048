"""The same, on an engine that keeps its weights as they were loaded, as vLLM does on CUDA: on the CPU it otherwise packs them
for oneDNN or AMX. Imported by the worker before the model is loaded."""

import vllm._custom_ops
import vllm.model_executor.layers.utils
from sync_extension import Extension

vllm._custom_ops._supports_onednn = False
vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda *args: False


class PlainExtension(Extension):
    pass

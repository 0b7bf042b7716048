"""The same, on an engine that keeps its weights as they were loaded, as vLLM does on CUDA: on the CPU it otherwise packs them
for oneDNN. Imported by the worker before the model is loaded."""

import vllm._custom_ops
from sync_extension import Extension

vllm._custom_ops._supports_onednn = False


class PlainExtension(Extension):
    pass

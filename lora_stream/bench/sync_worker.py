"""What `bench sync` adds to vLLM's workers for the rivals: loading weights that came pickled over an RPC."""

import pickle

from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


class Extension:
    def load_pickled(self, blob: bytes) -> None:
        weights = pickle.loads(blob)
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights(weights)
            finalize_layerwise_reload(model, self.model_config)

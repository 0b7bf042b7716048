"""Importing this module patches verl: it is for the setting of verl that names a module to import in every worker,
`actor_rollout_ref.model.external_lib`. See verl.py."""

from lora_stream.integrations import verl

PATCH = verl.patch()

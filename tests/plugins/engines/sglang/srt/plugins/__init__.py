from importlib import import_module

from sglang.srt.plugins.hook_registry import HookRegistry

GENERAL_PLUGINS_GROUP = "sglang.srt.plugins"


def load_plugins():
    import_module("weft_sglang").register()
    HookRegistry.apply_hooks()

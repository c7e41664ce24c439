"""The page of the documentation that says more about a problem, found by the key that the problem names."""

from __future__ import annotations

import re

PAGES: dict[str, str] = {
    "hosts machines most node": "docs/cluster.md#in-the-file",
    "gpus gpu_count deploy devices runtime": "docs/gpus.md#which-there-are",
    "vram ram host_memory reserve": "docs/gpus.md#what-a-model-needs",
    "pin home home_after ttl max_queue": "docs/staying.md",
    "any_of": "docs/staying.md#whoever-is-there-any_of",
    "url api_key_env ca_file": "docs/elsewhere.md#a-server-elsewhere",
    "fallback": "docs/elsewhere.md#fallbacks",
    "presets strip set": "docs/presets.md#presets",
    "loras": "docs/presets.md#lora-adapters",
    "routing infer_type kv_tokens profile failure_domain policies": "docs/routing.md",
    "evict_to demote_after checkpoint_anyway": "docs/reference.md#standby-levels",
    "prompt_cache": "docs/swaps.md#prompts-that-outlive-a-swap",
    "engine port served_model ports": "docs/reference.md#engines",
    "policy": "docs/policies.md",
    "eviction": "docs/reference.md#evictions",
    "key_file listen allowed_hosts cors ANVIL_API_KEYS": "docs/security.md",
    "tls_cert tls_key": "docs/security.md#tls",
    "hooks": "docs/seeing.md#hooks",
    "capture": "docs/sharing.md#what-was-asked-and-answered",
    "when_paused": "docs/sharing.md#my-gpu-please-pausing",
    "extends include env_file label_file": "docs/running.md#docker-or-podman",
}
"""Keys -> the page that explains them."""
BY_KEY = {key: page for keys, page in PAGES.items() for key in keys.split()}
OF_SERVICES = "docs/reference.md#x-anvil-on-a-service"
OF_ALL = "docs/reference.md#x-anvil-at-the-top-level"
PLACED = re.compile(r"\S.*?:\d+: ")
KEYS = re.compile(r"(?:--|ANVIL_(?!API))?([\w./@-]+): ")


def page_of(problem: str) -> str:
    """Return the page for a problem as it is shown; "" for one that names no key, such as bad YAML."""
    rest = problem[place.end() :] if (place := PLACED.match(problem)) else problem
    if not place and (unplaced := re.match(r"\S+\.ya?ml: ", rest)):
        rest = rest[unplaced.end() :]
    named = KEYS.match(rest)
    if named is None:
        return ""
    path = named[1].split(".")
    for part in reversed(path):
        key = part if part.startswith("ANVIL_") else part.lower().replace("-", "_")
        if key in BY_KEY:
            return BY_KEY[key]
    return OF_SERVICES if path[0] == "services" else OF_ALL

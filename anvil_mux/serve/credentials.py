"""The API keys and certificates, in files beside the compose file; whether they suffice for an address."""

from __future__ import annotations

import os
import ssl
from contextlib import suppress
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path

from anvil_mux import state
from anvil_mux.config.config import Config
from anvil_mux.config.diagnostic import Diagnostic
from anvil_mux.config.keys import Keyring
from anvil_mux.config.keys import load as load_keys
from anvil_mux.config.table import SETTINGS
from anvil_mux.errors import ConfigError
from anvil_mux.proxy.tls import build_context


def checked(config: Config, *, insecure: bool) -> tuple[Keyring, ssl.SSLContext | None]:
    """ConfigError if they cannot be used, or if too little is asked of other processes."""
    keys, tls = secrets(config)
    if (why := open_address(config, keys)) and not insecure:
        raise ConfigError([why])
    return keys, tls


def secrets(config: Config) -> tuple[Keyring, ssl.SSLContext | None]:
    """Read the keys and certificates in other files; ConfigError names all that is wrong with them."""
    problems: list[str] = []
    keys, tls = Keyring(), None
    try:
        file = Path(config.key_file) if config.key_file else None
        keys = load_keys(file, os.environ).sharing(config.max_queue)
    except ConfigError as error:
        problems += error.problems
    try:
        tls = tls_context(config)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return keys, tls


def open_address(config: Config, keys: Keyring) -> str:
    """Why it should not be listened there, "" if nothing is against it."""
    try:
        loopback = config.host == "localhost" or ip_address(config.host).is_loopback
    except ValueError:
        loopback = False
    if loopback or keys:
        return ""
    text = (
        f"listen: {config.host} can be reached by others, and there are no API keys: everybody there "
        "could use and swap your models. Give keys (key_file, or ANVIL_API_KEYS), listen on 127.0.0.1, "
        "or say --insecure if that is meant."
    )
    origin = config.origins.get("listen", "")
    said = f"{origin}: {text}" if ":" in origin else text
    return Diagnostic(text, said=said, write="key_file: keys.txt", key=("x-anvil", "listen"))


def tls_context(config: Config) -> ssl.SSLContext | None:
    """The certificate that the configuration names, if any; ConfigError if it does not serve."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    try:
        return build_context(config.tls_cert, config.tls_key)
    except OSError as error:
        files = f"{config.tls_cert} and {config.tls_key}"
        text = f"tls_cert: {files} cannot be used: {error.strerror or error}"
        raise ConfigError([Diagnostic(text, key=("x-anvil", "tls_cert"))]) from None


def files(config: Config) -> dict[str, str | None]:
    """Setting -> the file that it names, if it is set."""
    return {key: getattr(config, key) for key, setting in SETTINGS.items() if setting.is_file}


def digests(config: Config) -> dict[str, str]:
    """Key of a setting -> a digest of the file that it names, by which a change of the file is known."""
    said = {}
    for key, file in files(config).items():
        with suppress(OSError):  # told by whoever needs it
            said[key] = sha256(state.read_bytes(file)).hexdigest() if file else ""
    return said

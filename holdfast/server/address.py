"""The server's address and its URL. The address is bound before anything else starts."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from dataclasses import replace

from holdfast.files.regular import open_file
from holdfast.server.config import ServerConfig


def listen(config: ServerConfig) -> socket.socket:
    """Bind the address. This precedes the loading of a model, so that a port in use fails early. Raises OSError.

    With several API processes, each listens at the address, and the kernel spreads connections over them.
    """
    listener = bind(config, shared=config.api_processes > 1)
    listener.listen(2048)
    return listener


def reserve(config: ServerConfig) -> socket.socket:
    """Bind the address for API processes that will listen there, and get no connections. Raises OSError.

    It also raises if a server listens there already, which would otherwise get a share of the connections.
    """
    bind(config, shared=False).close()
    return bind(config, shared=True)


def reserve_grpc(config: ServerConfig) -> socket.socket:
    """Bind the port of gRPC, and get no connections. Raises OSError.

    gRPC binds it once more and listens, which Linux allows while this socket does not listen.
    """
    assert config.grpc_port is not None
    return bind(replace(config, port=config.grpc_port, grpc_port=None), shared=False, option="--grpc-port")


def bind(config: ServerConfig, *, shared: bool, option: str = "--port") -> socket.socket:
    """Bind the address. If `shared`, further processes of this user can bind it, too. Raises OSError.

    `option` is the one that sets the port.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # Name the protocol: asyncio turns off Nagle's delay (40 ms per reply) only for sockets marked as TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        why = error.strerror or str(error)
        place = f"{config.host}:{config.port}"
        raise OSError(f"cannot listen on {place}: {why}; choose another {option} or --host") from None
    listener.setblocking(False)
    return listener


def loopback(host: str) -> bool:
    """Whether only this machine can reach an address. Names other than localhost count as reachable from elsewhere."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_tls(config: ServerConfig) -> None:
    """Raises ValueError if the certificate and its key cannot be used."""
    if config.ssl_certfile is None:
        return
    try:
        for path in filter(None, (config.ssl_certfile, config.ssl_keyfile)):
            open_file(path).close()  # Raises for a pipe, for which OpenSSL would wait.
        # An empty password, because nobody can type one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            config.ssl_certfile, config.ssl_keyfile, password=lambda: ""
        )
    except OSError as error:  # SSLError is a subclass.
        files = " and ".join(filter(None, (config.ssl_certfile, config.ssl_keyfile)))
        raise ValueError(f"{files} cannot be used as certificate and key: {error.strerror or error}") from None


def url_of(listener: socket.socket, config: ServerConfig) -> str:
    """Return the server's URL for clients on this machine."""
    scheme = "http" if config.ssl_certfile is None else "https"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{authority(reachable(host), port)}"


def reachable(host: str) -> str:
    """Return the address at which clients on this machine reach a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def authority(host: str, port: int) -> str:
    """Return a host and port as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

"""Who may open a session: key files, the allow-list of clients, and whose a connection within this machine is.

A folder of keys, as ``rpc-reading-worker keygen DIR`` makes it:

    server.key    secret key of the daemons, mode 0600
    server.pub    its public key, by which clients know the daemons
    client.key    secret key of a client, mode 0600
    client.pub    its public key
    allowed/      a *.pub file for each client that the daemons let in

A daemon reads ``server.key`` and ``allowed``, a client ``client.key`` and ``server.pub``: neither needs the other's
secret. Keys are those of CURVE, Curve25519, as 40 characters of Z85, one to a file.

Beside them every session has a pair of its own, drawn by the client and told to its workers over the encrypted control
channel: it locks the session's data ports and feeds for everybody else, other clients of the daemon among them.
"""

import logging
import os
import socket
import stat
import struct
import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from rpc_reading_service.errors import KeysError

logger = logging.getLogger(__name__)

KEY_CHARACTERS = 40
SECRET_BYTES = 32
ALLOWED = "allowed"
PEERS_REMEMBERED = 1000
MAKE_KEYS = "make keys with rpc-reading-worker keygen DIR"


@dataclass(frozen=True)
class Pair:
    """A secret key and its public key."""

    secret: str = field(repr=False)

    @property
    def public(self) -> str:
        return zmq.curve_public(self.secret.encode()).decode()

    @property
    def raw(self) -> bytes:
        """The secret key as it travels to workers; ``from_raw`` is the way back."""
        return z85.decode(self.secret)

    @classmethod
    def new(cls) -> "Pair":
        return cls(zmq.curve_keypair()[1].decode())

    @classmethod
    def from_raw(cls, raw: bytes) -> "Pair":
        return cls(z85.encode(raw).decode())


@dataclass(frozen=True)
class CurveKeys:
    """What a client needs to open sessions on daemons that have keys: ``RPCReadingService(keys=CurveKeys.load(DIR))``.

    Args:
        secret: the client's secret key, 40 characters of Z85
        server: the daemons' public key, likewise

    Raises:
        KeysError: one of them is no key.
    """

    secret: str = field(repr=False)
    server: str

    def __post_init__(self) -> None:
        for name, key in (("secret", self.secret), ("server", self.server)):
            if not is_key(key):
                raise KeysError(f"CurveKeys: {name} is no key: it must be {KEY_CHARACTERS} characters of Z85")

    @property
    def pair(self) -> Pair:
        return Pair(self.secret)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "CurveKeys":
        """From ``client.key`` and ``server.pub`` in a folder.

        Raises:
            KeysError: a file is missing, cannot be read, can be read by others, or holds no key.
        """
        return cls(_read_secret(Path(folder, "client.key")), _read_key(Path(folder, "server.pub")))


@dataclass(frozen=True)
class ServerKeys:
    """What a daemon needs to let in some clients and nobody else."""

    pair: Pair
    allowed: "AllowList"

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "ServerKeys":
        """From ``server.key`` and ``allowed`` in a folder.

        Raises:
            KeysError: a file is missing, cannot be read, can be read by others, or holds no key.
        """
        return cls(Pair(_read_secret(Path(folder, "server.key"))), AllowList(Path(folder, ALLOWED)))


def is_key(text: str) -> bool:
    """Whether it is 40 characters that stand for 32 bytes."""
    try:
        return len(text) == KEY_CHARACTERS and len(z85.decode(text)) == SECRET_BYTES
    except (ValueError, KeyError, struct.error):  # what pyzmq's decoder raises for other characters
        return False


# Files.


def _read_secret(path: Path) -> str:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise _unreadable(path, error) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KeysError(
            f"the secret key {path} can be used by others than its owner (mode {mode:04o}): chmod 600 {path}"
        )
    return _read_key(path)


def _read_key(path: Path) -> str:
    try:
        text = path.read_text(errors="replace").strip()
    except OSError as error:
        raise _unreadable(path, error) from error
    if not is_key(text):
        raise KeysError(f"{path} holds no key: {MAKE_KEYS}, or copy the file again")
    return text


def _unreadable(path: Path, error: OSError) -> KeysError:
    if isinstance(error, FileNotFoundError):
        return KeysError(f"there is no key {path}: {MAKE_KEYS}, and copy the file")
    return KeysError(f"the key {path} cannot be read: {error.strerror}; it must belong to the user who needs it")


def create(folder: str | os.PathLike[str]) -> None:
    """Make a folder of keys: a pair for the daemons, a pair for a client, and the allow-list with that client.

    Raises:
        KeysError: something of it is there already, or cannot be written.
    """
    try:
        Path(folder, ALLOWED).mkdir(mode=0o700, parents=True, exist_ok=True)
        server, client = Pair.new(), Pair.new()
        files = {"server.key": server.secret, "server.pub": server.public, "client.key": client.secret}
        files |= {"client.pub": client.public, f"{ALLOWED}/client.pub": client.public}
        existing = [name for name in files if Path(folder, name).exists()]
        if existing:
            raise KeysError(f"{Path(folder, existing[0])} is there already, and is not overwritten: name a new folder")
        for name, key in files.items():
            _write(Path(folder, name), key)
    except OSError as error:
        raise KeysError(f"{folder}: keys cannot be written: {error.strerror}") from error


def _write(path: Path, key: str) -> None:
    mode = 0o600 if path.suffix == ".key" else 0o644
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(f"{key}\n")


class AllowList:
    """The public keys of the clients that are let in: every ``*.pub`` file of a folder, read again when one changes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: list[tuple[str, int, int]] | None = None
        self._keys: set[str] = set()

    def __contains__(self, public: str) -> bool:
        seen = self._look()
        if seen != self._seen:
            self._seen, self._keys = seen, self._read([name for name, *_ in seen])
            logger.info("%s lets %d clients in", self.folder, len(self._keys))
        return public in self._keys

    def _look(self) -> list[tuple[str, int, int]]:
        try:
            with os.scandir(self.folder) as entries:
                files = [(entry.path, entry.stat()) for entry in entries if entry.name.endswith(".pub")]
        except OSError as error:
            logger.error("! the allow-list cannot be read, so that nobody is let in: %s", error)
            return []
        return sorted((path, status.st_mtime_ns, status.st_ino) for path, status in files)

    @staticmethod
    def _read(paths: list[str]) -> set[str]:
        keys = set()
        for path in paths:
            try:
                keys.add(_read_key(Path(path)))
            except KeysError as error:
                logger.warning("! %s", error)
        return keys


# Without keys, on loopback: the kernel knows whose each connection is.

_ESTABLISHED = "01"


def owner(connection: int) -> int | None:
    """The user at the other end of a TCP connection within this machine; None if the kernel does not say.

    Args:
        connection: descriptor of our end
    """
    try:
        with socket.socket(fileno=os.dup(connection)) as ours:
            ends = _ends(ours.getpeername()), _ends(ours.getsockname())
    except OSError:
        return None
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in _rows(table):
            # One that is closed has no owner any more, and is listed with that of root.
            if row[1] in ends[0] and row[2] in ends[1] and row[3] == _ESTABLISHED and row[9] != "0":
                return int(row[7])
    return None


def _rows(table: str) -> list[list[str]]:
    try:
        return [line.split() for line in Path(table).read_text().splitlines()[1:]]
    except OSError:
        return []


def _ends(address: tuple[str, int]) -> set[str]:
    """How the kernel's tables write it: an IPv4 address may be there as an IPv6 one, too."""
    host, port = address[0].removeprefix("::ffff:"), address[1]
    if ":" in host:
        forms = [socket.inet_pton(socket.AF_INET6, host.partition("%")[0])]
    else:
        packed = socket.inet_aton(host)
        forms = [packed, bytes(10) + b"\xff\xff" + packed]
    return {f"{_words(form)}:{port:04X}" for form in forms}


def _words(packed: bytes) -> str:
    words = [packed[at : at + 4] for at in range(0, len(packed), 4)]
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)


# Logs.


class Strangers:
    """Logs the first trouble that each peer makes; of a peer that goes on, only a count is kept."""

    def __init__(self) -> None:
        self.counts: OrderedDict[tuple[str, str], int] = OrderedDict()
        self.total = 0

    def note(self, peer: str, trouble: str, detail: str = "") -> None:
        """Trouble of a kind; the detail is that of this time."""
        self.total += 1
        count = self.counts.pop((peer, trouble), 0)
        self.counts[peer, trouble] = count + 1
        if count == 0:
            logger.warning("! %s %s%s; more of the kind is not logged", peer, trouble, detail and f" ({detail})")
        while len(self.counts) > PEERS_REMEMBERED:
            self.counts.popitem(last=False)

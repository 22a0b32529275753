"""Every message is worth the same after ``decode(encode(message))``; other bytes are refused by one error only."""

import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from rpc_reading_service.messages import (
    CHUNK_BYTES,
    CONTROL_BYTES,
    PROTOCOL_VERSION,
    CountedMessage,
    Credit,
    Data,
    FromClient,
    FromDaemon,
    FromWorker,
    FromWorkerData,
    GraphChunk,
    Heartbeat,
    Hello,
    Message,
    Place,
    SessionMessage,
    StartWorker,
    ToAsker,
    ToWorker,
    ToWorkerData,
    WorkerMessage,
    WorkerReady,
    decode,
    encode,
)

UNIONS = {
    "FromClient": FromClient,
    "FromDaemon": FromDaemon,
    "ToAsker": ToAsker,
    "ToWorker": ToWorker,
    "FromWorker": FromWorker,
    "FromWorkerData": FromWorkerData,
    "ToWorkerData": ToWorkerData,
}


def members(union: Any) -> tuple[type[Message], ...]:
    return typing.get_args(union) or (union,)


MEMBERS = [(kind, name) for name, union in UNIONS.items() for kind in members(union)]
KINDS = sorted({kind for kind, _ in MEMBERS}, key=lambda kind: kind.__name__)
BASES = {Message, CountedMessage, SessionMessage, WorkerMessage, Data}
SESSION = "0123456789abcdef" * 2


# ---------------------------------------------------------------------------------------------------- helpers


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Everything that a field of this type may hold."""
    match kind:
        case inspect.IntType(ge=ge, le=le):
            return st.integers(-(1 << 63) if ge is None else ge, (1 << 63) - 1 if le is None else le)
        case inspect.StrType(min_length=least, max_length=most, pattern=pattern):
            alphabet = "0123456789abcdef" if pattern else st.characters(codec="utf-8")
            return st.text(alphabet, min_size=least or 0, max_size=min(most or 40, 64))
        case inspect.FloatType(ge=ge):
            return st.floats(min_value=ge, allow_nan=False)
        case inspect.EnumType(cls=cls):
            return st.sampled_from(cls)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.UnionType(types=types):
            return st.one_of(*map(values, types))
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=4)
        case inspect.ListType(item_type=item):
            return st.lists(values(item), max_size=4)
        case inspect.BytesType(min_length=least, max_length=most):
            return st.binary(min_size=least or 0, max_size=most)
        case inspect.StructType(cls=cls):
            return built(cls)
    raise NotImplementedError(kind)


def fields(kind: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    return described.fields


def built(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    return st.builds(kind, *(values(field.type) for field in fields(kind)))


def raw(message: Message) -> list[Any]:
    """The message as plain values, to be tampered with."""
    plain = msgspec.msgpack.decode(encode(message))
    assert isinstance(plain, list)
    return plain


def bad_values(kind: inspect.Type) -> Iterator[tuple[Any, str]]:
    """Values just outside of what the field may hold, each with the words of its refusal."""
    match kind:
        case inspect.IntType(ge=ge, le=le):
            yield "1", "Expected `int`, got `str`"
            yield 1.5, "Expected `int`, got `float`"
            if ge is not None:
                yield ge - 1, f"Expected `int` >= {ge}"
            if le is not None:
                yield le + 1, f"Expected `int` <= {le}"
        case inspect.StrType(min_length=least, max_length=most, pattern=pattern):
            yield 1, "Expected `str`, got `int`"
            yield b"a" * 32, "Expected `str`, got `bytes`"
            if least is not None:
                yield "a" * (least - 1), f"Expected `str` of length >= {least}"
            if most is not None:
                yield "a" * (most + 1), f"Expected `str` of length <= {most}"
            if pattern is not None:
                yield "A" * 32, "Expected `str` matching regex"
                yield "../" + "a" * 29, "Expected `str` matching regex"
        case inspect.FloatType(ge=ge):
            yield "1.0", "Expected `float`, got `str`"
            if ge is not None:
                yield ge - 1.0, f"Expected `float` >= {ge}"
        case inspect.EnumType(cls=cls):
            yield len(cls), f"Invalid enum value {len(cls)}"
        case inspect.StructType(cls=cls):
            good = msgspec.to_builtins(cls(*example(cls)))
            for place, field in enumerate(fields(cls)):
                for value, words in bad_values(field.type):
                    yield [*good[:place], value, *good[place + 1 :]], words
        case inspect.BoolType():
            yield 1, "Expected `bool`, got `int`"
        case inspect.UnionType(types=types) if any(isinstance(each, inspect.StructType) for each in types):
            yield 1, "Expected `array | null`, got `int`"
            yield [1, b"short"], "Expected `bytes` of length >= 32"
        case inspect.UnionType():
            yield -1, "Expected `int` >= 0"
            yield "1", "Expected `int | null`, got `str`"
        case inspect.DictType(key_type=inspect.IntType()):
            yield {"one": [1] * 6}, "Expected `int`, got `str`"
            yield {1: [1] * 5}, "Expected `array` of at least length 6, got 5"
            yield [], "Expected `object`, got `array`"
        case inspect.DictType():
            yield {"python": 3}, "Expected `str`, got `int`"
            yield [], "Expected `object`, got `array`"
        case inspect.ListType(item_type=item):
            yield None, "Expected `array`"
            for value, words in bad_values(item):
                yield [value], words
        case _:
            raise NotImplementedError(kind)


def examples() -> Iterator[Message]:
    """One message of each kind, the same every time."""
    for kind in KINDS:
        yield kind(*example(kind))


def example(kind: type[msgspec.Struct]) -> list[Any]:
    """Arguments of one value of this kind, the same every time."""
    return [SESSION * 2 if field.name == "graph" else plain_value(field.type) for field in fields(kind)]


def plain_value(kind: inspect.Type) -> Any:
    match kind:
        case inspect.StrType():
            return SESSION
        case inspect.DictType(value_type=inspect.StructType()):
            return {7: Place(*[7] * 6)}
        case inspect.DictType():
            return {"python": "3.11"}
        case inspect.ListType(item_type=item):
            return [plain_value(item)]
        case inspect.StructType(cls=cls):
            return cls(*example(cls))
        case inspect.EnumType(cls=cls):
            return next(iter(cls))
    return {inspect.IntType: 7, inspect.FloatType: 1.5, inspect.BoolType: True, inspect.UnionType: None}[type(kind)]


EXAMPLES = {type(message): message for message in examples()}


# ---------------------------------------------------------------------------------------------------- there and back


def test_every_message_belongs_to_a_direction() -> None:
    def below(kind: type[Message]) -> Iterator[type[Message]]:
        for each in kind.__subclasses__():
            yield each
            yield from below(each)

    assert set(below(Message)) - BASES == set(KINDS)


def test_what_the_daemon_relays_is_what_client_and_worker_say_to_each_other() -> None:
    assert set(typing.get_args(ToWorker)) < set(typing.get_args(FromClient))
    assert set(typing.get_args(FromWorker)) < set(typing.get_args(FromDaemon))


@pytest.mark.parametrize(("kind", "union"), MEMBERS, ids=lambda each: getattr(each, "__name__", each))
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_a_message_comes_back_as_it_was(kind: type[Message], union: str, data: st.DataObject) -> None:
    message = data.draw(built(kind))
    assert decode(encode(message), UNIONS[union]) == message


@pytest.mark.parametrize("container", [bytes, bytearray, memoryview])
def test_a_frame_is_any_bytes_like_object(container: Any) -> None:
    message = Credit(SESSION, 1, 0, 3, 17, True)
    assert decode(container(encode(message)), ToWorkerData) == message


def test_a_message_is_a_compact_array_told_apart_by_its_name() -> None:
    assert raw(Credit(SESSION, 1, 0, 3, 17, True)) == ["Credit", SESSION, 1, 0, 3, 17, True]


def test_a_log_that_shows_messages_tells_no_session() -> None:
    shown = [f"{message}" for message in EXAMPLES.values() if isinstance(message, SessionMessage)]
    assert len(shown) > 20
    assert all(f"session='{SESSION[:8]}...'" in each and SESSION not in each for each in shown)


def test_a_message_cannot_be_changed() -> None:
    message: Any = Credit(SESSION, 1, 0, 3, 17, True)
    with pytest.raises(AttributeError, match="immutable type: 'Credit'"):
        message.consumed = 18


def test_a_hello_of_a_later_protocol_is_still_read() -> None:
    frame = msgspec.msgpack.encode(["Hello", PROTOCOL_VERSION + 1, {"python": "3.20.0"}, "cpu1 (pid 7)", "more"])
    assert decode(frame, FromClient) == Hello(PROTOCOL_VERSION + 1, {"python": "3.20.0"}, "cpu1 (pid 7)")


def test_a_graph_chunk_and_its_message_fit_into_a_control_frame() -> None:
    assert CHUNK_BYTES + len(encode(GraphChunk(SESSION, (1 << 63) - 1))) <= CONTROL_BYTES


# ---------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("union", UNIONS)
def test_a_message_of_another_direction_is_refused(union: str) -> None:
    for kind in set(KINDS) - set(members(UNIONS[union])):
        # Where there is one kind alone, its length is looked at first.
        with pytest.raises(msgspec.DecodeError, match=rf"Invalid value '{kind.__name__}'|Expected `array` of at least"):
            decode(encode(EXAMPLES[kind]), UNIONS[union])


@pytest.mark.parametrize(("kind", "union"), MEMBERS, ids=lambda each: getattr(each, "__name__", each))
def test_a_field_out_of_its_range_is_refused_by_place_and_limit(kind: type[Message], union: str) -> None:
    for place, field in enumerate(fields(kind), 1):
        for value, words in bad_values(field.type):
            plain = raw(EXAMPLES[kind])
            plain[place] = value
            with pytest.raises(msgspec.DecodeError) as caught:
                decode(msgspec.msgpack.encode(plain), UNIONS[union])
            assert words in str(caught.value)
            assert f"$[{place}]" in str(caught.value)


def test_an_identifier_does_not_end_in_a_newline() -> None:
    frame = encode(Heartbeat("a" * 31 + "\n", 0))
    with pytest.raises(msgspec.DecodeError, match="matching regex"):
        decode(frame, FromClient)


@pytest.mark.parametrize(("kind", "union"), MEMBERS, ids=lambda each: getattr(each, "__name__", each))
def test_every_truncation_is_refused(kind: type[Message], union: str) -> None:
    frame = encode(EXAMPLES[kind])
    for length in range(len(frame)):
        with pytest.raises(msgspec.DecodeError, match=r"truncated|at least length"):
            decode(frame[:length], UNIONS[union])


@pytest.mark.parametrize(("kind", "union"), MEMBERS, ids=lambda each: getattr(each, "__name__", each))
def test_a_message_without_its_last_field_is_refused(kind: type[Message], union: str) -> None:
    plain = raw(EXAMPLES[kind])
    with pytest.raises(msgspec.DecodeError, match=f"at least length {len(plain)}, got {len(plain) - 1}"):
        decode(msgspec.msgpack.encode(plain[:-1]), UNIONS[union])


def test_bytes_after_the_message_are_refused() -> None:
    with pytest.raises(msgspec.DecodeError, match="trailing characters"):
        decode(encode(Heartbeat(SESSION, 0)) + b"\0", FromClient)


def test_text_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError, match="Invalid UTF-8"):
        decode(encode(Hello(1, {}, "abc")).replace(b"abc", b"\xff\xfe\xfd"), FromClient)


@pytest.mark.parametrize("nesting", [b"\x91", b"\x81\xa1a"], ids=["arrays", "maps"])
def test_nesting_without_end_is_refused(nesting: bytes) -> None:
    frame = encode(Hello(1, {}, "a"))
    more = bytes([frame[0] + 1]) + frame[1:] + nesting * 100_000  # one element more than Hello has
    with pytest.raises(msgspec.DecodeError):
        decode(more, FromClient)


@given(data=st.data(), union=st.sampled_from(sorted(UNIONS)))
@settings(max_examples=150, deadline=None)
def test_changed_bytes_give_a_message_or_the_one_error(data: st.DataObject, union: str) -> None:
    message = EXAMPLES[data.draw(st.sampled_from(members(UNIONS[union])))]
    frame = bytearray(encode(message))
    for place in data.draw(st.lists(st.integers(0, len(frame) - 1), min_size=1, max_size=3)):
        frame[place] = data.draw(st.integers(0, 255))
    check_decodes_or_is_refused(bytes(frame), union)


@given(frame=st.binary(max_size=64), union=st.sampled_from(sorted(UNIONS)))
@settings(max_examples=150, deadline=None)
def test_any_bytes_give_a_message_or_the_one_error(frame: bytes, union: str) -> None:
    check_decodes_or_is_refused(frame, union)


def check_decodes_or_is_refused(frame: bytes, union: str) -> None:
    try:
        message = decode(frame, UNIONS[union])
    except msgspec.DecodeError:
        return
    assert isinstance(message, members(UNIONS[union]))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (StartWorker(SESSION, 0, 0, 0, 1, 0, 1), "Expected `int` >= 1"),
        (StartWorker(SESSION, 0, 0, 0, 1, 1, 0), "Expected `int` >= 1"),
        (WorkerReady(SESSION, 0, 0, 1, 65536, None), "Expected `int` <= 65535"),
        (WorkerReady(SESSION, 0, 0, 1, 0, None), "Expected `int` >= 1"),
    ],
    ids=["no batch", "no byte", "port too high", "port 0"],
)
def test_limits_hold_where_they_are_decoded(message: Message, words: str) -> None:
    union = FromClient if isinstance(message, StartWorker) else FromWorker
    with pytest.raises(msgspec.DecodeError, match=words):
        decode(encode(message), union)

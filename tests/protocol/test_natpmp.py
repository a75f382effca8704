import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol import natpmp
from protocol.errors import MappingFailed, ProtocolError
from protocol.natpmp import Epoch, Grant
from protocol.transport import Address

NONCE = bytes(range(12))
IPV4 = "00" * 10 + "ffff"  # the prefix of IPv4 addresses in PCP

# Laid out by hand after the figures of RFC 6886, sections 3.2 and 3.3, and of RFC 6887, sections 7 and 11.1.
NATPMP_ADDRESS = bytes.fromhex("00 80 0000 00000e10 cb007107")
NATPMP_MAP = bytes.fromhex("00 82 0000 00000e11 1b9e 1f90 00000078")
PCP_REQUEST = bytes.fromhex(f"02 01 0000 00000258 {IPV4} c0a80105 {NONCE.hex()} 06 000000 1b9e 1f90 {IPV4} cb007107")
PCP_REMOVAL = bytes.fromhex(f"02 01 0000 00000000 {IPV4} c0a80105 {NONCE.hex()} 06 000000 1b9e 0000 {IPV4} 00000000")
PCP_MAP = bytes.fromhex(f"02 81 00 00 00000078 00000e10 {'00' * 12} {NONCE.hex()} 06 000000 1b9e 1f90 {IPV4} cb007107")
GRANT = Grant(Address("203.0.113.7", 8080), 120, 3600)


def changed(data, offset, *values):
    return data[:offset] + bytes(values) + data[offset + len(values) :]


def test_natpmp_requests():
    assert natpmp.natpmp_address_request().hex() == "0000"
    assert natpmp.natpmp_map_request(7070, 8080, 600) == bytes.fromhex("00 02 0000 1b9e 1f90 00000258")
    assert natpmp.natpmp_map_request(7070, 0, 0) == bytes.fromhex("00 02 0000 1b9e 0000 00000000")


def test_natpmp_answers():
    assert natpmp.read_natpmp_address(NATPMP_ADDRESS) == ("203.0.113.7", 3600)
    grant = natpmp.read_natpmp_map(NATPMP_MAP, 7070, "203.0.113.7")
    assert grant == Grant(Address("203.0.113.7", 8080), 120, 3601)


def test_pcp_requests():
    wanted = Address("203.0.113.7", 8080)
    assert natpmp.pcp_map_request("192.168.1.5", NONCE, 7070, wanted, 600) == PCP_REQUEST
    assert natpmp.pcp_map_request("192.168.1.5", NONCE, 7070, None, 0) == PCP_REMOVAL


def test_pcp_answers():
    assert natpmp.read_pcp_map(PCP_MAP, NONCE, 7070) == GRANT
    with_option = PCP_MAP + bytes.fromhex("7f 00 0004 00000000")
    assert natpmp.read_pcp_map(with_option, NONCE, 7070) == GRANT
    ipv6 = PCP_MAP[:44] + bytes.fromhex("20010db8000000000000000000000007")
    assert natpmp.read_pcp_map(ipv6, NONCE, 7070).external == Address("2001:db8::7", 8080)


@pytest.mark.parametrize(
    "answer",
    [
        bytes.fromhex("00 80 0001 00000e10"),  # from a gateway that knows only NAT-PMP
        bytes.fromhex("01 81 00 01 00000000 00000e10 000000000000000000000000"),  # only the first draft of PCP
        changed(PCP_MAP, 3, 1),
    ],
)
def test_other_version_is_a_refusal(answer):
    with pytest.raises(MappingFailed, match="does not know this version"):
        natpmp.read_pcp_map(answer, NONCE, 7070)


def test_refusals_have_reasons():
    with pytest.raises(MappingFailed, match="switched off") as natpmp_refusal:
        natpmp.read_natpmp_map(changed(NATPMP_MAP, 2, 0, 2), 7070)
    with pytest.raises(MappingFailed, match="no room"):
        natpmp.read_pcp_map(changed(PCP_MAP, 3, 8), NONCE, 7070)
    with pytest.raises(MappingFailed, match="result 77"):
        natpmp.read_pcp_map(changed(PCP_MAP, 3, 77)[:24], NONCE, 7070)
    assert "router" in natpmp_refusal.value.hint


@pytest.mark.parametrize(
    "answer",
    [
        changed(PCP_MAP, 1, 0x01),  # a request
        changed(PCP_MAP, 1, 0x82),  # another opcode
        changed(PCP_MAP, 24, 1),  # another nonce
        changed(changed(PCP_MAP, 24, 1), 3, 2),  # a refusal of somebody else's request
        changed(PCP_MAP, 36, 17),  # UDP
        changed(PCP_MAP, 40, 0, 1),  # another port
        PCP_MAP[:24],  # cut off
        PCP_MAP[:-1],
        PCP_MAP + bytes(1100),
    ],
)
def test_stray_pcp_datagrams_are_told_apart(answer):
    with pytest.raises(ProtocolError):
        natpmp.read_pcp_map(answer, NONCE, 7070)


@pytest.mark.parametrize(
    "answer", [NATPMP_ADDRESS, changed(NATPMP_MAP, 9, 0), NATPMP_MAP[:-1], NATPMP_MAP + b"\0", NATPMP_MAP[:7], PCP_MAP]
)
def test_stray_natpmp_datagrams_are_told_apart(answer):
    with pytest.raises(ProtocolError):
        natpmp.read_natpmp_map(answer, 7070)


def read_by_all(data):
    for read in (
        natpmp.read_natpmp_address,
        lambda data: natpmp.read_natpmp_map(data, 7070),
        lambda data: natpmp.read_pcp_map(data, NONCE, 7070),
    ):
        with contextlib.suppress(ProtocolError, MappingFailed):
            read(data)


@given(st.binary(max_size=1200) | st.binary(max_size=80).map(lambda tail: PCP_MAP[:24] + tail))
@example(b"")
def test_garbage_is_an_error_of_ours(data):
    read_by_all(data)


@given(st.data(), st.sampled_from([NATPMP_ADDRESS, NATPMP_MAP, PCP_MAP]))
def test_damaged_answers_are_read_or_refused(data, answer):
    offset = data.draw(st.integers(0, len(answer) - 1))
    read_by_all(changed(answer, offset, data.draw(st.integers(0, 255))))


@pytest.mark.parametrize(
    "grant",
    [
        Grant(Address("203.0.113.7", 0), 120),
        Grant(Address("203.0.113.7", 8080), 0),
        Grant(Address("0.0.0.0", 8080), 120),
        Grant(Address("127.0.0.1", 8080), 120),
        Grant(Address("224.0.0.1", 8080), 120),
        Grant(Address("::", 8080), 120),
    ],
)
def test_what_is_no_mapping_is_found_out(grant):
    with pytest.raises(MappingFailed):
        grant.check()


def test_a_mapping_passes():
    GRANT.check()


@pytest.mark.parametrize("host", ["10.0.0.1", "172.31.0.1", "192.168.1.1", "100.64.0.1", "192.0.0.2", "169.254.0.1"])
def test_inside_addresses(host):
    assert natpmp.is_inside(host)


@pytest.mark.parametrize("host", ["9.255.255.255", "172.32.0.1", "100.128.0.1", "203.0.113.7", "2001:db8::7"])
def test_outside_addresses(host):
    assert not natpmp.is_inside(host)


@pytest.mark.parametrize(
    ("later", "restarted"),
    [
        (Epoch(1100, 200.0), False),  # just as long
        (Epoch(1086, 200.0), False),  # a clock that is slow by an eighth
        (Epoch(1085, 200.0), True),
        (Epoch(5, 200.0), True),
        (Epoch(1098, 100.0), True),
        (Epoch(9000, 101.0), False),  # ours stood still while the machine slept
    ],
)
def test_restarts_show_in_the_epoch(later, restarted):
    earlier = Epoch(1000, 100.0) if later.heard > 100 else Epoch(1101, 100.0)
    assert earlier.restarted(later) == restarted


def test_waits_double():
    assert natpmp.retransmissions(4) == (0.25, 0.5, 1.0, 2.0)
    assert natpmp.retransmissions(9)[-1] == 64  # RFC 6886, section 3.1

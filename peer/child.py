"""One daemon of the demo: a child process with its own home, event file and log."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from peer.recording import Event, LineTail, Recording

# Runs a command that the kernel kills when the thread that started it ends, so that even SIGKILL for the demo leaves no
# daemon behind (PR_SET_PDEATHSIG = 1, SIGKILL = 9; it outlives exec). The parent may have ended before the call.
GUARD = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the demo has ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""
ERROR = re.compile(r"error:|Traceback \(most recent call last\)")
LOG_LINES = 20  # of a log, quoted when a daemon fails


def spawn(command: Sequence[str], log: Path, output: Path | None = None) -> subprocess.Popen[bytes]:
    """Starts a command without input; its standard error, and output unless that has its own file, go to a log.

    It is in a session of its own, so that Ctrl-C reaches only the demo, which then stops its daemons in order. Call
    this from the main thread: on Linux the command ends when the calling thread does.
    """
    guard = [sys.executable, "-I", "-S", "-c", GUARD, str(os.getpid())] if sys.platform == "linux" else []
    with log.open("ab") as log_file, (output or log).open("ab") as output_file:
        return subprocess.Popen(
            [*guard, *command],
            stdin=subprocess.DEVNULL,
            stdout=output_file,
            stderr=log_file,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )


class Child:
    """A daemon process, its files below one directory, and what it has said so far.

    Args:
        name: What the demo calls it.
        root: The demo's directory.
    """

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.home = root / name / "home"
        self.events = root / name / "events.jsonl"
        self.ticket = root / name / "ticket"
        self.log = root / name / "log"
        self.recording = Recording(name)
        self.killed = False
        self.complained = False
        """True once its log has a line that looks like an error."""
        self._process: subprocess.Popen[bytes] | None = None
        self._event_lines = LineTail(self.events)
        self._log_lines = LineTail(self.log)
        self.home.parent.mkdir(parents=True, exist_ok=True)

    def start(self, command: Sequence[str]) -> None:
        """Starts the process."""
        self._process = spawn(command, self.log)

    def start_daemon(self, command: Sequence[str], *what: str, data: str, flags: Mapping[str, object]) -> None:
        """Starts a daemon on loopback that trains on the processor.

        Args:
            command: How to call Shoal's command line.
            what: The command, such as "join" with a ticket.
            data: "stdlib", or the path of a text file or directory.
            flags: Further options, with their values.
        """
        usual = {
            "--home": self.home,
            "--listen": "127.0.0.1:0",
            "--events": self.events,
            "--ticket-file": self.ticket,
            "--data": data if data == "stdlib" else Path(data).resolve(),
            "--device": "cpu",
            "--threads": 1,
        }
        words = [str(word) for flag in {**usual, **flags}.items() for word in flag]
        # --debug: a traceback belongs into the log, since the home with its crash.log may be removed at the end.
        self.start([*command, *what, "--debug", *words])

    @property
    def exit_code(self) -> int | None:
        """None until the process has ended (or before it was started)."""
        return None if self._process is None else self._process.poll()

    @property
    def running(self) -> bool:
        """True while the process lives."""
        return self._process is not None and self._process.poll() is None

    def poll(self) -> list[Event]:
        """Takes in what the daemon has written since the last call; raises EventError."""
        events = [Event.parse(line) for line in self._event_lines.read()]
        for event in events:
            self.recording.add(event)
        for line in self._log_lines.read():
            self.complained = self.complained or ERROR.match(line) is not None
        return events

    def read_ticket(self) -> str:
        """The ticket that it has written, or nothing while it has not."""
        return self.ticket.read_text().strip() if self.ticket.exists() else ""

    def log_tail(self) -> str:
        """The last lines of the daemon's log."""
        if not self.log.exists():
            return ""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([line for line in lines if line.strip()][-LOG_LINES:])

    def explanation(self) -> str:
        """The line of its log that says best what went wrong: its last error message, or else its last line."""
        lines = self.log_tail().splitlines() or ["it printed nothing"]
        return next((line for line in reversed(lines) if line.startswith("error:")), lines[-1])

    def terminate(self) -> None:
        """Asks the process to stop (SIGTERM)."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """Kills the process (SIGKILL) and waits for it to be gone."""
        if self._process is not None:
            self.killed = self._process.poll() is None
            self._process.kill()
            self._process.wait()

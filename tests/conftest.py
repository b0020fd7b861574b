"""For all tests: no limit of time that a busy machine could break, and interrupts that arrive."""

import contextlib
import signal

from hypothesis import settings

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

# Where the tests run in the background of a shell, SIGINT is ignored, and every child would inherit that.
with contextlib.suppress(ValueError):  # not in a thread of a test runner
    signal.signal(signal.SIGINT, signal.default_int_handler)

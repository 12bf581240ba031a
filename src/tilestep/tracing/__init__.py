"""One training iteration as lanes of work, with the optimizer's exposed time: `tilestep.profile` and `tilestep trace`.

torch's profiler brings the events; this package says whose work each is. It knows nothing of optimizers but the names
that their work carries.
"""

from __future__ import annotations

from .lanes import Iteration, Lanes, read_events, split
from .session import Profile, Report, collecting, profile, report_on

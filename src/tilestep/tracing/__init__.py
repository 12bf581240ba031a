"""One training iteration as lanes of work, with the optimizer's exposed time: `tilestep.profile` and `tilestep trace`.

torch's profiler brings the events; this package says whose work each is. It knows nothing of optimizers but the names
that their work carries.
"""

from __future__ import annotations

from .events import read_events
from .iterations import Iteration, split
from .lanes import Lanes
from .report import Report, report_on
from .session import Profile, collecting, profile

__all__ = ["Iteration", "Lanes", "Profile", "Report", "collecting", "profile", "read_events", "report_on", "split"]

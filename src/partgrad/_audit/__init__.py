"""The audit: find wrong gradients before anyone suspects them, where they are taken."""

from .audit import Audited as Audited, audited as audited, joined as joined
from .last import last_nonfinite as last_nonfinite
from .page import page as page
from .recorder import Recorder as Recorder
from .report import data as data, text as text
from .script import main as main
from .settings import Settings as Settings, from_project as from_project

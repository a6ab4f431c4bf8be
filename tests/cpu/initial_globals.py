"""The names of all modules in the server of processes, before it starts the first process.

Reading them takes longer than starting a process, so only the server reads them.
"""

import gc

from tests.cpu.gloo_processes import Globals

INITIAL = Globals()
gc.freeze()  # comes last, so that no child searches the server's objects for garbage

"""The fits of `sharded_fit.py` by two processes that see each other's devices, as two hosts would.

Run it with ``python examples/multihost_fit.py``. It starts two processes with four virtual devices each, which
communicate over the loopback interface. On a real cluster, `jax.distributed.initialize()` reads what it needs from the
environment; the rest is the same.
"""

import argparse
import socket
import subprocess
import sys

import jax

import sharded_fit

PROCESSES = 2


def be_one_of_them(process: int, address: str) -> None:
    """Fit and compare, together with the other processes."""
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_x64", True)
    jax.distributed.initialize(address, num_processes=PROCESSES, process_id=process)
    done = sharded_fit.fits(jax.devices())
    print(f"{jax.process_count()} processes, {jax.local_device_count()} devices each")
    agree = sharded_fit.report(done)
    jax.distributed.shutdown()
    if not agree:
        sys.exit("The fits differ.")


def start_them() -> int:
    """Start the processes, of which the first one prints, wait for them, and say how they ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, *sys.orig_argv[1:], "--address", address, "--process"]
    outputs = [None] + [subprocess.DEVNULL] * (PROCESSES - 1)
    running = [subprocess.Popen([*command, str(process)], stdout=to) for process, to in enumerate(outputs)]
    try:
        return max(abs(process.wait(timeout=300)) for process in running)
    finally:
        for process in running:
            process.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process is None:
        sys.exit(start_them())
    be_one_of_them(arguments.process, arguments.address)

"""llama.cpp's HTTP server from the package xllamacpp.

python -m bench.support.llamacpp_server MODEL.gguf PORT [--threads 2] [--parallel 32]
"""

from __future__ import annotations

import argparse
import threading


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("port", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--parallel", type=int, default=32, help="sequences at a time (default: %(default)s)")
    parser.add_argument("--context", type=int, default=512, help="tokens of one sequence (default: %(default)s)")
    args = parser.parse_args()

    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = args.model
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = args.port
    parameters.n_parallel = args.parallel
    parameters.n_ctx = args.parallel * args.context
    parameters.cpuparams.n_threads = args.threads
    server = xllamacpp.Server(parameters)  # serves from threads of its own until it is deleted
    threading.Event().wait()
    del server


if __name__ == "__main__":
    main()

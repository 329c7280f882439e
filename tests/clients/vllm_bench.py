"""`vllm bench serve`, whose command looks for a package `vllm`; the one for CPUs has another name."""

import argparse

from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())

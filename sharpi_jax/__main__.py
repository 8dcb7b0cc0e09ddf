"""`python -m sharpi_jax` is the same program as the console script `sharpi-jax`."""

from sharpi_jax.cli.main import run

if __name__ == "__main__":
    run()

"""What talks to the outside: the only code that knows httpx and tenacity."""

"""The command line: flags are read here and nowhere else; everything below it is a library."""

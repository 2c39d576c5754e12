"""The command ``hasten``: one thin file per command."""

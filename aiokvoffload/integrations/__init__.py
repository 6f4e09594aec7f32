"""Engines that this library plugs into; each module imports its engine, and nothing else imports the module."""

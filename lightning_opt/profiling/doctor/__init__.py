"""A checklist answered from what the callbacks have measured."""

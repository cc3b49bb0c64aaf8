"""The history of the tables, run by `resilient.store.db.schema`."""

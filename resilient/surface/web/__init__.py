"""Routes for an app's own web server; `resilient.web` has the public names."""

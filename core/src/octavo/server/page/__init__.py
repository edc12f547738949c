"""The page at `/`: a playground over the server's own API, in plain HTML, CSS and ES modules (`static/`)."""

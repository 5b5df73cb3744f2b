"""Images in registries: logins, requests, tokens, and blobs fetched ahead."""

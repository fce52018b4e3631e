"""`pagemill top`: what the processes of a deployment count, scraped, turned into rates and shown."""

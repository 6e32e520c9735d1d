"""Winners -> an artifact folder -> a model that runs.

artifact (compile), pack (several shares), manifest (what a folder says of itself), loading.
"""

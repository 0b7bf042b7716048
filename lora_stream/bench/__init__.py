"""`lora-stream bench`: what we cost beside the ceiling and beside the other ways, on the machine and model of who asks.

measuring ──► results ──► showing, plotting, comparing
merge, stream, sync fill them; commands is the command line
"""

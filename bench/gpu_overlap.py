"""gpu_overlap.py TRACE.json: how much of each copy to the GPU went on beside kernels, in a trace of bench_gpu_data."""
import json
import sys

events = [event for event in json.load(open(sys.argv[1]))["traceEvents"] if event.get("ph") == "X"]
kernels = [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") == "kernel"]
copies = [event for event in events if event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"]]
for copy in copies:
    start, end = copy["ts"], copy["ts"] + copy["dur"]
    beside = sum(max(0, min(end, b) - max(start, a)) for a, b in kernels)
    print(f"{copy['args']['bytes']} bytes on stream {copy['args']['stream']}: {copy['dur']:.1f} us, beside kernels {beside:.1f} us")

from pathlib import Path
def sub(path, pairs):
    p=Path(path); s=p.read_text()
    for a,b in pairs:
        assert s.count(a)==1,(path,a,s.count(a))
        s=s.replace(a,b)
    p.write_text(s)
sub("docs/from-a-wheel.md",[
('''What the wheel needs, torch above all, came over the network. The index that was used
had of this torch the build for the processor alone. Elsewhere the same line brings
gigabytes of libraries for NVIDIA cards; the [quick start](quick-start.md) has the line
that leaves them out wherever it is typed.
''','''What the wheel needs, torch above all, came over the network.
The index that was used has of this torch the build for the processor alone.
Elsewhere the same line brings gigabytes of libraries for NVIDIA cards;
the [quick start](quick-start.md) has the line that leaves them out.
'''),
])
p=Path("tests/packaging/test_a_stranger.py"); s=p.read_text()
a=s.index("        needed = \"\\n\".join("); b=s.index("    cores, gib", a)
s=s[:a]+'''        needed = (
            "came over the network.\\n"
            "The index that was used has of this torch the build for the processor alone.\\n"
            "Elsewhere the same line brings gigabytes of libraries for NVIDIA cards;\\n"
            "the [quick start](quick-start.md) has the line that leaves them out."
        )
'''+s[b:]
p.write_text(s)
sub("README.md",[('''Nothing
else need be installed beforehand. Get''','''Nothing
else need be installed beforehand ([other systems](docs/volunteer.md#before-the-first-command)). Get''')])
sub("docs/volunteer.md",[
('''CuPy, which is no part of what is installed, gives steps on such a card some faster kernels with the same results
([decision 53](decisions/0053-device-kernels.md)): `pipx inject p2p-dtfm cupy-cuda12x`, and `cupy-cuda13x` where PyTorch is for
CUDA 13. Of AMD's''','''CuPy (the extra `cuda`) is not installed by itself. With it such a card takes faster kernels for a part of each step, with the
same results ([decision 53](decisions/0053-device-kernels.md)): `pipx inject p2p-dtfm cupy-cuda12x`, and `cupy-cuda13x` where PyTorch
is for CUDA 13. Of AMD's'''),
('''so nobody can say it beforehand. With one
layer's holder or more beside it a machine sends its gradients or differences about once in each step, and receives as much; whose line is fast
adds up the others' parts as well and sends two or three times that. In a run that steps alone in between, as `gpt2-small-homes` does, these
are 5.1 MB, and the plan for `three-homes` has steps of 16.8 s: 5.1 to 5.7 MB each way for the homes with 20 and 50
Mbit/s up, 14.7 MB for those with 500. A weekend has 10,300 such steps: 53 to 59 GB each way, and 151 GB. All of that is predicted, not
measured; data, layers and copies for others come on top. A run that reduces all gradients in each step sends many times as much.
What it is for you the page says (`p2p-dtfm dashboard`) as soon as you take part: under "This peer's part" with whom you exchange how
many bytes in a step, and under "What you have given" what the plan had you send in all. What bounds it in any case is `--uplink-mbps` and
`--downlink-mbps`: each Mbit/s is at most 21.6 GB in 48 hours.
''','''so no page can say it. Where others hold the same layers, a machine sends its gradients or differences
about once in each step, and gets as much; one with a fast line adds up the others' parts, too, and sends several times that.
An example, **predicted**: six machines of `three-homes` train `gpt2-small-homes`, which exchanges differences of 5.1 MB in steps
of 16.8 s. The plan has those with 20 or 50 Mbit/s up send 5.1 to 5.7 MB in each, those with 500 send 14.7, and all receive what they send. 48 hours are
10,300 such steps: 53 to 59 GB each way, and 151 GB. Data, layers and copies for others come on top. A run that reduces whole
gradients in each step sends many times as much.

What it is for you, the page says once you take part (`p2p-dtfm dashboard`): under "This peer's part" with whom you exchange how many
bytes in a step, under "What you have given" what the plan had you send so far. What bounds it in any case are `--uplink-mbps` and
`--downlink-mbps`: of each Mbit/s 48 hours make 21.6 GB at most.
'''),
])

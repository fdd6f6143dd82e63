"""What is done to whom in a seed. Begin with `draw`.

schedule        what a schedule is: who begins, who joins, and each fault
first_seeds     from which number on each family of seeds begins
ordinary        all kinds of faults, in long and in short runs
crashes         machines that only crash, one upon the other
moments         faults that begin when something is said
late_words      one word is late, and somebody dies meanwhile
absences        somebody is away for long, on slow machines
routers         some machines are behind routers, and relays die
crowds          dozens come at once, and a part of them goes at once
liars           some lie, in a run with audits
draw            which of these a seed has
"""

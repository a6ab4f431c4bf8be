import sys
sys.path.insert(0,"/tmp/w")
from tests.cpu.gloo_processes import run, run_fresh, RankError
from cpuplug import now
def nothing(rank): return rank
def fail(rank): raise ValueError
def tryrun(n, f=run):
    try: f(fail,n)
    except RankError: pass
def rep(label, f, k=5):
    a=now(); 
    for _ in range(k): f()
    b=now(); print(label, "self %.3f kids %.3f wall %.3f"%tuple((y-x)/k for x,y in zip(a,b)))
if __name__=="__main__":
    run(nothing,4)
    rep("ok 4", lambda: run(nothing,4))
    rep("fail 4", lambda: tryrun(4))
    rep("fail 2", lambda: tryrun(2))
    rep("fresh fail 4", lambda: tryrun(4,run_fresh))
    rep("fresh 4", lambda: run_fresh(nothing,4))
    rep("fail 4", lambda: tryrun(4))

"""`python -m smelt.train CONFIG.yaml`: a training run, in every worker that torchrun has started."""

from smelt.train.trainer.entrypoint import main

if __name__ == "__main__":
    main()

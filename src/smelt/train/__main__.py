"""`python -m smelt.train CONFIG.yaml`: a training run, in every process that torchrun starts."""

from smelt.train.trainer.entrypoint import main

if __name__ == "__main__":
    main()

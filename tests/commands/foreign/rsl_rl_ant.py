class AntPPORunnerCfg(RslRlOnPolicyRunnerCfg):  # noqa: F821
    num_steps_per_env = 32
    max_iterations = 1000
    save_interval = 50
    experiment_name = "ant"
    empirical_normalization = False
    policy = RslRlPpoActorCriticCfg(  # noqa: F821
        init_noise_std=1.0,
        actor_hidden_dims=[400, 200, 100],
        critic_hidden_dims=[400, 200, 100],
        activation="elu",
    )
    algorithm = RslRlPpoAlgorithmCfg(  # noqa: F821
        value_loss_coef=1.0,
        use_clipped_value_loss=True,
        clip_param=0.2,
        entropy_coef=0.0,
        num_learning_epochs=5,
        num_mini_batches=4,
        learning_rate=5.0e-4,
        schedule="adaptive",
        gamma=0.99,
        lam=0.95,
        desired_kl=0.01,
        max_grad_norm=1.0,
    )

//! Every configuration builds a sampler that draws, or returns an error that names the missing part.
#![cfg(all(feature = "cpu", feature = "distributed"))]

use flash_sampling::distributed::Sharded;
use flash_sampling::{
    Backend, BackendConfig, BuildError, CpuOptions, DType, Exactness, Head, HeadError, HeadOwner, Isa, Matrix,
    OwnedWeight, PerturbedArgmax, Plan, RowParams, Samples, ShardError, ShardMerge, VariantConfig, build,
    build_from_logits, build_owned, capabilities_of, make_shadow,
};

const VOCAB: usize = 700;
const HIDDEN: usize = 40;

fn weight() -> Vec<f32> {
    (0..VOCAB * HIDDEN).map(|i| ((i * 7919) % 13) as f32 - 6.0).collect()
}

fn head(weight: &[f32]) -> Head<'_> {
    Head::new(Matrix::new(weight, VOCAB, HIDDEN).unwrap()).unwrap().with_scale(0.125).unwrap()
}

fn tokens(sampler: &mut dyn PerturbedArgmax) -> Vec<u32> {
    let hidden: Vec<f32> = (0..4 * HIDDEN).map(|i| (i % 3) as f32 - 1.0).collect();
    let rows = [0, 1, 2, 3].map(|position| RowParams { seed: 9, position, draws: 3, ..RowParams::default() });
    let mut samples = Samples::new();
    sampler.sample(Matrix::new(&hidden, 4, HIDDEN).unwrap(), &rows, &mut samples).unwrap();
    samples.iter().flat_map(|row| row.unwrap().draws.iter().map(|d| d.token)).collect()
}

const PLAN: Plan = Plan { max_rows: 4, max_draws: 3, max_logprobs: None, canonical: false };

fn config(backend: Backend, variant: VariantConfig) -> BackendConfig {
    BackendConfig { backend, variant, plan: PLAN, shadow: false }
}

#[test]
fn pathwise_configurations_give_the_same_tokens() {
    let weight = weight();
    let want = tokens(&mut *build(head(&weight), &config(Backend::Reference, VariantConfig::Tiled)).unwrap());
    let sharded = |shards| VariantConfig::Sharded { shards, merge: ShardMerge::Winners };
    for backend in [Backend::Reference, Backend::Cpu(CpuOptions::default())] {
        for variant in [VariantConfig::Tiled, sharded(1), sharded(3), sharded(100)] {
            let mut sampler = build(head(&weight), &config(backend.clone(), variant.clone())).unwrap();
            assert_eq!(sampler.capabilities().exactness, Exactness::Pathwise);
            assert_eq!(tokens(&mut *sampler), want, "{backend:?}, {variant:?}");
        }
    }
}

#[test]
fn a_shadow_changes_no_token_and_is_refused_for_quantised_weights() {
    let weight = weight();
    let sharded = VariantConfig::Sharded { shards: 3, merge: ShardMerge::Winners };
    let online = BackendConfig { shadow: true, ..config(Backend::default(), VariantConfig::Online { size: 64 }) };
    let error = build(head(&weight), &online).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.starts_with("online:64 on cpu uses no shadow"), "{error}");
    let plain =
        |backend| [VariantConfig::Tiled, sharded.clone()].map(|variant| config(Backend::clone(&backend), variant));
    for plain in plain(Backend::default()).into_iter().chain(plain(Backend::Reference)) {
        let want = tokens(&mut *build(head(&weight), &plain).unwrap());
        let with_shadow = BackendConfig { shadow: true, ..plain.clone() };
        assert_eq!(tokens(&mut *build(head(&weight), &with_shadow).unwrap()), want, "{plain:?}");
        let buffer = make_shadow(&head(&weight).weight()).unwrap();
        let head = head(&weight).with_shadow(buffer.shadow()).unwrap();
        let mut shadowed = build(head, &plain).unwrap();
        assert_eq!(tokens(&mut *shadowed), want, "{plain:?}");
        assert!(shadowed.capabilities().shadow && capabilities_of(&with_shadow).unwrap().shadow, "{plain:?}");
        assert!(!capabilities_of(&plain).unwrap().shadow, "{plain:?}");
        assert!(head.with_shadow(buffer.shadow().row_range(1..VOCAB)).is_err());
    }
    let blocks = vec![0u8; 34 * VOCAB];
    let head = Head::new(Matrix::from_bytes(&blocks, DType::Q8_0, VOCAB, 32, 32).unwrap()).unwrap();
    let with_shadow = BackendConfig { shadow: true, ..BackendConfig::default() };
    let error = build(head, &with_shadow).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.starts_with("a weight of type q8_0 has no shadow: it must be bf16, f16 or f32; "), "{error}");
}

/// A call counts the rows that read the weight in spite of a shadow. A shard counts its rows, and a row counts once.
#[test]
fn rows_that_fall_back_from_a_shadow_are_counted() {
    // Logits of a few tokens stand out, so that upper bounds exclude the other tokens of a tile.
    const TOKENS: usize = 4000;
    let weight: Vec<f32> = (0..TOKENS * HIDDEN).map(|i| (i as f32 * 0.37).sin() * 0.2).collect();
    let head = Head::new(Matrix::new(&weight, TOKENS, HIDDEN).unwrap()).unwrap();
    let hidden: Vec<f32> = (0..HIDDEN).map(|i| (i as f32 * 0.9).cos()).collect();
    let sharded = VariantConfig::Sharded { shards: 2, merge: ShardMerge::Winners };
    for backend in [Backend::default(), Backend::Reference] {
        for variant in [VariantConfig::Tiled, sharded.clone()] {
            for shadow in [true, false] {
                let config = BackendConfig { shadow, ..config(backend.clone(), variant.clone()) };
                let mut sampler = build(head, &config).unwrap();
                let mut samples = Samples::new();
                let row = RowParams::default();
                let filtered = RowParams { top_p: 0.9, ..row };
                for (row, fallbacks) in [(row, 0), (filtered, 1), (row, 0)] {
                    sampler.sample(Matrix::new(&hidden, 1, HIDDEN).unwrap(), &[row], &mut samples).unwrap();
                    assert!(samples.row(0).is_ok());
                    let want = if shadow { fallbacks } else { 0 };
                    assert_eq!(samples.fallback_rows(), want, "{backend:?}, {variant:?}, {row:?}");
                }
            }
        }
    }
}

#[test]
fn configurations_exact_in_distribution_follow_their_reference() {
    let weight = weight();
    for variant in [VariantConfig::Grouped { size: 128 }, VariantConfig::Online { size: 64 }] {
        let of = |backend| build(head(&weight), &config(backend, variant.clone())).unwrap();
        let [mut reference, mut cpu] = [Backend::Reference, Backend::default()].map(of);
        assert_eq!(cpu.capabilities().exactness, Exactness::InDistribution);
        assert_eq!(tokens(&mut *reference), tokens(&mut *cpu), "{variant:?}");
    }
}

#[test]
fn the_merge_by_log_mass_has_the_requested_plan() {
    let weight = weight();
    let variant = VariantConfig::Sharded { shards: 3, merge: ShardMerge::LogMass };
    let of = |backend| build(head(&weight), &config(backend, variant.clone())).unwrap();
    let [mut reference, mut cpu] = [Backend::Reference, Backend::default()].map(of);
    assert_eq!(tokens(&mut *reference), tokens(&mut *cpu));
    assert_eq!(cpu.plan(), PLAN);
    let row = RowParams { logprobs: Some(0), ..RowParams::default() };
    let mut samples = Samples::new();
    cpu.sample(Matrix::new(&[0f32; HIDDEN], 1, HIDDEN).unwrap(), &[row], &mut samples).unwrap();
    let error = samples.row(0).unwrap_err();
    assert_eq!(error.to_string(), "logprobs must be planned for: Plan::max_logprobs is none");
}

#[test]
fn what_cannot_be_built_is_named() {
    let weight = weight();
    let error = |backend, variant| build(head(&weight), &config(backend, variant)).err().unwrap();
    let sharded = |shards| VariantConfig::Sharded { shards, merge: ShardMerge::Winners };
    assert!(matches!(error(Backend::Reference, sharded(0)), BuildError::Shards { shards: 0 }));
    assert!(matches!(error(Backend::Reference, sharded(usize::MAX)), BuildError::Shards { .. }));
    assert!(matches!(error(Backend::Reference, VariantConfig::Online { size: 0 }), BuildError::GroupSize));
    assert!(matches!(error(Backend::default(), VariantConfig::Online { size: 100 }), BuildError::Cpu(_)));
    let text = error(Backend::Cuda { device: 0 }, VariantConfig::Tiled).to_string();
    assert!(text.contains("cuda") || text.contains("CUDA is unavailable"), "{text}");
    // A shard of a head is not a whole vocabulary.
    let part = build(head(&weight).slice(64..VOCAB as u32), &config(Backend::Reference, sharded(2)));
    assert!(matches!(part.err(), Some(BuildError::Shard(ShardError::Gap { shard: 0, from: 0, to: 64 }))));
}

#[test]
fn existing_logits_give_the_tokens_of_the_head_that_made_them() {
    let weight = weight();
    let want = tokens(&mut *build(head(&weight), &config(Backend::default(), VariantConfig::Tiled)).unwrap());
    let hidden: Vec<f32> = (0..4 * HIDDEN).map(|i| (i % 3) as f32 - 1.0).collect();
    let dot = |(h, w): (&[f32], &[f32])| 0.125 * h.iter().zip(w).map(|(h, w)| h * w).sum::<f32>();
    let row = |h| weight.chunks(HIDDEN).map(move |w| dot((h, w)));
    let logits: Vec<f32> = hidden.chunks(HIDDEN).flat_map(row).collect();
    let mut sampler = build_from_logits(VOCAB, &config(Backend::default(), VariantConfig::Tiled)).unwrap();
    let rows = [0, 1, 2, 3].map(|position| RowParams { seed: 9, position, draws: 3, ..RowParams::default() });
    let mut samples = Samples::new();
    sampler.sample(Matrix::new(&logits, 4, VOCAB).unwrap(), &rows, &mut samples).unwrap();
    let found: Vec<u32> = samples.iter().flat_map(|row| row.unwrap().draws.iter().map(|d| d.token)).collect();
    assert_eq!(found, want);
    let online = config(Backend::default(), VariantConfig::Online { size: 64 });
    let error = build_from_logits(VOCAB, &online).err().unwrap();
    assert_eq!(error.to_string(), "existing logits cannot be sampled by online:64: the variant must be tiled");
}

#[test]
fn configurations_are_read_as_they_are_written() {
    let cpu = |isa, threads| Backend::Cpu(CpuOptions { isa, threads });
    for (text, backend) in [
        ("reference", Backend::Reference),
        ("cpu", cpu(None, None)),
        ("cpu:portable", cpu(Some(Isa::Portable), None)),
        ("cpu:avx2:4", cpu(Some(Isa::Avx2), Some(4))),
        ("cpu::1", cpu(None, Some(1))),
        ("cuda:3", Backend::Cuda { device: 3 }),
    ] {
        assert_eq!((text.parse(), backend.to_string().as_str()), (Ok(backend), text));
    }
    assert_eq!("cuda".parse(), Ok(Backend::Cuda { device: 0 }));
    for (text, variant) in [
        ("tiled", VariantConfig::Tiled),
        ("grouped:512", VariantConfig::Grouped { size: 512 }),
        ("online:64", VariantConfig::Online { size: 64 }),
        ("sharded:4", VariantConfig::Sharded { shards: 4, merge: ShardMerge::Winners }),
        ("sharded:4:log-mass", VariantConfig::Sharded { shards: 4, merge: ShardMerge::LogMass }),
    ] {
        assert_eq!((text.parse(), variant.to_string().as_str()), (Ok(variant), text));
    }
    for text in ["", "gpu", "cpu:sse", "cpu:avx2:4:1", "cuda:x", "reference:1"] {
        let error = text.parse::<Backend>().unwrap_err().to_string();
        assert!(error.starts_with(&format!("'{text}' is no backend: it must be reference, cpu")), "{error}");
    }
    for text in ["tiled:1", "grouped", "grouped:512:old", "online:-1", "sharded:4:winners:1"] {
        assert!(text.parse::<VariantConfig>().is_err(), "{text}");
    }
}

#[cfg(feature = "serde")]
#[test]
fn a_configuration_is_read_from_json() {
    let text = r#"{"backend": "cpu:portable", "variant": "online:64", "plan": {"max_rows": 8}}"#;
    let found: BackendConfig = serde_json::from_str(text).unwrap();
    let backend = Backend::Cpu(CpuOptions { isa: Some(Isa::Portable), threads: None });
    let plan = Plan { max_rows: 8, ..Plan::default() };
    assert_eq!(found, BackendConfig { backend, variant: VariantConfig::Online { size: 64 }, plan, shadow: false });
    assert_eq!(serde_json::from_str::<BackendConfig>(&serde_json::to_string(&found).unwrap()).unwrap(), found);
    for wrong in [r#"{"backend": "gpu"}"#, r#"{"backends": "cpu"}"#, r#"{"plan": {"rows": 1}}"#] {
        assert!(serde_json::from_str::<BackendConfig>(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn a_sampler_that_owns_its_weight_draws_the_same_and_outlives_the_caller() {
    let weight = weight();
    let want = tokens(&mut *build(head(&weight), &config(Backend::default(), VariantConfig::Tiled)).unwrap());
    struct Scaled(OwnedWeight<Vec<u8>>);
    impl HeadOwner for Scaled {
        fn head(&self) -> Result<Head<'_>, HeadError> {
            self.0.head()?.with_scale(0.125)
        }
    }
    let bytes: Vec<u8> = weight.iter().flat_map(|w| w.to_ne_bytes()).collect();
    let owned = |vocab| Scaled(OwnedWeight::new(bytes.clone(), DType::F32, vocab, HIDDEN));
    for variant in [VariantConfig::Tiled, VariantConfig::Sharded { shards: 3, merge: ShardMerge::Winners }] {
        let mut sampler: Box<dyn PerturbedArgmax> =
            build_owned(owned(VOCAB), &config(Backend::default(), variant)).unwrap();
        assert_eq!(std::thread::spawn(move || tokens(&mut *sampler)).join().unwrap(), want);
    }
    let error = build_owned(owned(VOCAB + 1), &config(Backend::default(), VariantConfig::Tiled)).err().unwrap();
    assert!(matches!(error, BuildError::Head(_)), "{error}");
}

/// Filters of a shard need its scan.
#[test]
fn an_owned_sampler_is_a_shard_with_filters() {
    let bytes: Vec<u8> = weight().iter().flat_map(|value| value.to_ne_bytes()).collect();
    let config = config(Backend::default(), VariantConfig::Tiled);
    let owned = build_owned(OwnedWeight::new(bytes, DType::F32, VOCAB, HIDDEN), &config).unwrap();
    let weight = weight();
    let whole = build(Head::new(Matrix::new(&weight, VOCAB, HIDDEN).unwrap()).unwrap(), &config).unwrap();
    let hidden: Vec<f32> = (0..4 * HIDDEN).map(|i| (i % 3) as f32 * 0.25).collect();
    let rows = [0.9, 0.5, 0.2, 1.0].map(|top_p| RowParams { seed: 4, top_p, top_k: 40, ..RowParams::default() });
    let draw = |sampler: &mut dyn PerturbedArgmax| {
        let mut samples = Samples::new();
        sampler.sample(Matrix::new(&hidden, 4, HIDDEN).unwrap(), &rows, &mut samples).unwrap();
        samples.iter().map(|row| row.unwrap().token()).collect::<Vec<_>>()
    };
    let mut sharded = Sharded::new(vec![owned], ShardMerge::Winners).unwrap();
    assert_eq!(draw(&mut sharded), draw(&mut { whole }));
}

#[test]
fn capabilities_are_known_without_a_head() {
    let weight: Vec<_> = weight().into_iter().map(flash_sampling::bf16::from_f32).collect();
    let variants = [
        VariantConfig::Tiled,
        VariantConfig::Grouped { size: 64 },
        VariantConfig::Online { size: 64 },
        VariantConfig::Sharded { shards: 3, merge: ShardMerge::Winners },
        VariantConfig::Sharded { shards: 3, merge: ShardMerge::LogMass },
    ];
    let mut seen = 0;
    for backend in [Backend::Reference, Backend::Cpu(CpuOptions::default())] {
        for (variant, canonical) in variants.iter().flat_map(|variant| [(variant, false), (variant, true)]) {
            let plan = Plan { canonical, ..PLAN };
            let config = BackendConfig { plan, ..config(backend.clone(), variant.clone()) };
            let head = Head::new(Matrix::new(&weight, VOCAB, HIDDEN).unwrap()).unwrap();
            match (build(head, &config), capabilities_of(&config)) {
                (Ok(sampler), Ok(can)) => {
                    seen += 1;
                    assert_eq!(sampler.capabilities(), can, "{config:?}");
                }
                (Err(a), Err(b)) => assert_eq!(a.to_string(), b.to_string()),
                (sampler, can) => panic!("{config:?}: {:?} and {can:?}", sampler.err()),
            }
        }
    }
    assert!(seen > 12, "{seen}");
}

#[cfg(feature = "cuda")]
#[test]
fn capabilities_of_gpus_are_those_of_the_cpu() {
    use flash_sampling::Knobs;
    for variant in [
        VariantConfig::Tiled,
        VariantConfig::Grouped { size: 64 },
        VariantConfig::Online { size: 64 },
        VariantConfig::Sharded { shards: 3, merge: ShardMerge::Winners },
        VariantConfig::Sharded { shards: 3, merge: ShardMerge::LogMass },
    ] {
        let of = |backend: Backend| capabilities_of(&config(backend, variant.clone())).unwrap();
        let (gpu, cpu) = (of(Backend::Cuda { device: 0 }), of(Backend::Cpu(CpuOptions::default())));
        // CUDA reads ranks and the logits of given tokens from stored logits; the CPU's online variant stores none.
        let stored = if matches!(variant, VariantConfig::Online { .. }) { Knobs::LOGPROBS } else { Knobs::NONE };
        assert_eq!((gpu.exactness, gpu.knobs), (cpu.exactness, cpu.knobs.union(stored)), "{variant:?}");
        assert_eq!((gpu.variant, gpu.without_replacement), (cpu.variant, cpu.without_replacement), "{variant:?}");
    }
}

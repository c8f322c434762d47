//! Every configuration gives a sampler that draws, or an error that names what is missing.
#![cfg(all(feature = "cpu", feature = "distributed"))]

use flash_sampling::{
    Backend, BackendConfig, BuildError, CpuOptions, Exactness, GroupDraw, Head, Matrix, PerturbedArgmax, Plan,
    RowParams, Samples, ShardError, ShardMerge, VariantConfig, build,
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
    BackendConfig { backend, variant, plan: PLAN }
}

#[test]
fn pathwise_configurations_give_the_same_tokens() {
    let weight = weight();
    let want = tokens(&mut *build(head(&weight), &config(Backend::Reference, VariantConfig::Tiled)).unwrap());
    let sharded = |shards| VariantConfig::Sharded { shards, merge: ShardMerge::Winners };
    for backend in [Backend::Reference, Backend::Cpu(CpuOptions::default())] {
        let mut variants = vec![VariantConfig::Tiled, sharded(1), sharded(3), sharded(100)];
        if backend != Backend::Reference {
            variants.push(VariantConfig::Grouped { size: 128, draw: GroupDraw::Reuse });
        }
        for variant in variants {
            let mut sampler = build(head(&weight), &config(backend.clone(), variant.clone())).unwrap();
            assert_eq!(sampler.capabilities().exactness, Exactness::Pathwise);
            assert_eq!(tokens(&mut *sampler), want, "{backend:?}, {variant:?}");
        }
    }
}

#[test]
fn configurations_exact_in_distribution_follow_their_reference() {
    let weight = weight();
    let fresh = VariantConfig::Grouped { size: 128, draw: GroupDraw::Fresh };
    for variant in [fresh, VariantConfig::Online { size: 64 }] {
        let of = |backend| build(head(&weight), &config(backend, variant.clone())).unwrap();
        let [mut reference, mut cpu] = [Backend::Reference, Backend::default()].map(of);
        assert_eq!(cpu.capabilities().exactness, Exactness::InDistribution);
        assert_eq!(tokens(&mut *reference), tokens(&mut *cpu), "{variant:?}");
    }
}

#[test]
fn the_merge_by_log_mass_keeps_the_plan_that_was_asked_for() {
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
    let reuse = VariantConfig::Grouped { size: 64, draw: GroupDraw::Reuse };
    assert!(matches!(error(Backend::Reference, reuse), BuildError::Unsupported { backend: "reference", .. }));
    let text = error(Backend::Cuda, VariantConfig::Tiled).to_string();
    assert!(text.contains("cuda") || text.contains("CUDA is unavailable"), "{text}");
    // A head that is itself a shard is no whole vocabulary.
    let part = build(head(&weight).slice(64..VOCAB as u32), &config(Backend::Reference, sharded(2)));
    assert!(matches!(part.err(), Some(BuildError::Shard(ShardError::Gap { shard: 0, from: 0, to: 64 }))));
}

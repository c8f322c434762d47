//! `kernels`: CUDA kernels compiled ahead of time.

use crate::common::run;

#[cfg(not(feature = "cuda"))]
#[test]
fn a_build_without_the_feature_says_so() {
    run(&["kernels", "build", "--arch", "sm_90a"]).assert_refused("this build has no feature 'cuda'");
    run(&["kernels", "list"]).assert_refused("this build has no feature 'cuda'");
}

#[cfg(feature = "cuda")]
mod with_cuda {
    use super::run;
    use crate::common::{Files, Run, run_command};
    use std::process::Command;

    /// Runs `flash-sampling` with folders of kernels in its environment.
    fn run_in(ahead: &str, cache: &str, args: &[&str]) -> Run {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flash-sampling"));
        command.args(args).env("FLASH_SAMPLING_KERNELS", ahead).env("FLASH_SAMPLING_CACHE", cache);
        run_command(&mut command, "warn")
    }

    #[test]
    fn architectures_that_are_not_known_are_refused_with_the_list() {
        let known = "known are sm_80, sm_86";
        for name in ["sm_75", "sm_90a,hopper", "", "90"] {
            run(&["kernels", "build", "--arch", name]).assert_refused(known);
        }
        run(&["kernels", "build", "--jobs", "0"]).assert_refused("it must be 1 to 256");
        for name in ["select", "select.cu,"] {
            run(&["kernels", "build", "--kernel", name]).assert_refused("known are fused_hopper.cu, ");
        }
    }

    #[test]
    fn folders_and_files_of_no_use_are_told_of_once() {
        let files = Files::new();
        let (none, ahead) = (files.name("none"), files.name("ahead"));
        std::fs::create_dir(&ahead).unwrap();
        let cut = files.bytes("ahead/cut-sm_80-0-13.0.kernel", b"flash-sampling kernel 1\n");
        let both = std::env::join_paths([&none, &ahead]).unwrap().into_string().unwrap();
        for args in [&["kernels", "list"][..], &["info"]] {
            let listing = run_in(&both, &files.name("cache"), args);
            let lines: Vec<_> = listing.stderr.lines().collect();
            assert!(listing.code == 0 && lines.len() == 2, "{listing:#?}");
            assert!(lines[0].contains("names a folder that is not there") && lines[0].contains(&none), "{lines:?}");
            assert!(lines[1].contains(&cut) && lines[1].contains("damaged or cut short"), "{lines:?}");
        }
    }

    #[test]
    fn a_cache_without_kernels_says_how_they_come() {
        let files = Files::new();
        let (none, empty) = (files.name("none"), files.name("empty"));
        std::fs::create_dir(&empty).unwrap();
        for cache in [&none, &empty] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_flash-sampling"));
            command.args(["kernels", "list", "--format", "json"]).env_remove("FLASH_SAMPLING_KERNELS");
            let Run { code, stdout, stderr } = run_command(command.env("FLASH_SAMPLING_CACHE", cache), "info");
            assert!(code == 0 && stdout.is_empty(), "{stderr}");
            let is_named =
                stderr.contains(&format!("no compiled kernels ({cache})")) && stderr.contains("kernels build");
            assert!(is_named && stderr.lines().count() == 1, "{stderr}");
        }
    }

    /// Needs the compiler's library, but no GPU.
    #[test]
    fn what_is_built_is_listed_and_a_folder_that_others_may_write_to_is_not_used() {
        if flash_sampling::cuda::compiler().is_none() {
            let required = std::env::var("FLASH_SAMPLING_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|r| r == "nvrtc"), "no libnvrtc, but FLASH_SAMPLING_REQUIRE names nvrtc");
            let (folder, line) =
                (Files::new(), "libnvrtc cannot be loaded; tried on the loader's path: libnvrtc.so, libnvrtc.so.1");
            run(&["kernels", "build", "--out", &folder.name("x")]).assert_refused(line);
            return;
        }
        let files = Files::new();
        let (ahead, cache) = (files.name("ahead"), files.name("cache"));
        // Some of them: CI builds them all.
        let two = "select.cu,near_ties.cu";
        let args =
            ["kernels", "build", "--arch", "sm_80", "--kernel", two, "--out", &ahead, "--format", "json", "--check"];
        let built = run_in("", &cache, &args);
        assert_eq!(built.code, 0, "{built:#?}");
        let [built, listed] =
            [built, run_in(&ahead, &cache, &["kernels", "list", "--format", "json"])].map(|run| run.rows());
        assert!(built.len() >= 2 && built.len() == listed.len());
        assert!(listed.iter().all(|file| file["current"] == true && file["architecture"] == "sm_80"), "{listed:?}");
        assert!(built.iter().all(|kernel| kernel["functions"][0]["registers"].as_u64() > Some(0)), "{built:?}");
        let all = built.len();
        let one_line = |more: &[&str], end: &str| {
            let text = ["kernels", "build", "--arch", "sm_80", "--kernel", two, "--out", &ahead];
            let listing = run_in("", &cache, &[&text, more].concat());
            let is_line =
                listing.stdout.lines().count() == 1 && listing.stdout.contains(end) && listing.stderr.is_empty();
            assert!(listing.code == 0 && is_line, "{listing:#?}");
        };
        one_line(&[], &format!("{all} kernels in {ahead}: there before"));
        one_line(&["--force"], &format!("{all} kernels in {ahead}: compiled in "));
        std::fs::remove_file(built[0]["path"].as_str().unwrap()).unwrap();
        one_line(&[], &format!("{} there before", all - 1));
        run(&["kernels", "build", "--force", "--check"]).assert_refused("'--force' cannot be used with '--check'");
        let info = run_in(&ahead, &cache, &["info"]).stdout;
        assert!(
            info.contains(&format!("{ahead}: {} compiled kernels (sm_80), 0 of other sources", built.len())),
            "{info}"
        );
        let path = built[0]["path"].as_str().unwrap();
        let whole = std::fs::read(path).unwrap();
        std::fs::write(path, &whole[..whole.len() - 1]).unwrap();
        let listed = run_in(&ahead, &cache, &["kernels", "list", "--format", "json"]);
        assert_eq!(listed.rows().len(), built.len() - 1);
        assert_eq!(listed.stderr.matches(path).count(), 1, "{listed:#?}");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(&ahead, std::fs::Permissions::from_mode(0o777)).unwrap();
            let listed = run_in(&ahead, &cache, &["kernels", "list", "--format", "json"]);
            assert!(listed.rows().is_empty() && listed.stderr.contains("everyone may write to it"), "{listed:#?}");
            let refused = run_in("", &cache, &args[..args.len() - 3]);
            assert!(refused.code == 2 && refused.stderr.contains("kernels cannot be kept in"), "{refused:#?}");
        }
    }
}

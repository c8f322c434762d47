//! `kernels`: CUDA kernels compiled ahead of time.

use crate::common::run;

#[cfg(not(feature = "cuda"))]
#[test]
fn a_build_without_the_feature_says_so() {
    run(&["kernels", "build", "--arch", "sm_90a"]).assert_refused("this build has no feature 'cuda'");
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
    fn folders_and_files_of_no_use_are_a_warning() {
        let files = Files::new();
        let (none, ahead) = (files.name("none"), files.name("ahead"));
        std::fs::create_dir(&ahead).unwrap();
        let cut = files.bytes("ahead/cut-sm_80-0-13.0.kernel", b"flash-sampling kernel 1\n");
        let both = std::env::join_paths([&none, &ahead]).unwrap().into_string().unwrap();
        let listing = run_in(&both, &files.name("cache"), &["info"]);
        let lines: Vec<_> = listing.stderr.lines().collect();
        assert!(listing.code == 0 && lines.len() == 2, "{listing:#?}");
        assert!(lines[0].contains("names a folder that is not there") && lines[0].contains(&none), "{lines:?}");
        assert!(lines[1].contains(&cut) && lines[1].contains("damaged or cut short"), "{lines:?}");
    }

    /// Needs the compiler's library, but no GPU.
    #[test]
    fn built_kernels_are_found_and_a_folder_that_others_may_write_to_is_not_used() {
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
        // Only some of the kernels: CI builds all.
        let two = "select.cu,near_ties.cu";
        let args = ["kernels", "build", "--arch", "sm_80", "--kernel", two, "--out", &ahead];
        let checked = run_in("", &cache, &[&args[..], &["--check"]].concat());
        assert_eq!(checked.code, 0, "{checked:#?}");
        let all = checked.stdout.lines().filter(|line| line.contains(" for sm_80: good")).count();
        assert!(all >= 2 && checked.stdout.contains(" registers, bytes "), "{checked:#?}");
        let one_line = |more: &[&str], end: &str| {
            let listing = run_in("", &cache, &[&args, more].concat());
            let is_line =
                listing.stdout.lines().count() == 1 && listing.stdout.contains(end) && listing.stderr.is_empty();
            assert!(listing.code == 0 && is_line, "{listing:#?}");
        };
        one_line(&[], &format!("{all} kernels in {ahead}: there before"));
        one_line(&["--force"], &format!("{all} kernels in {ahead}: compiled in "));
        let paths: Vec<_> = std::fs::read_dir(&ahead).unwrap().map(|entry| entry.unwrap().path()).collect();
        let kernel = paths.iter().find(|path| path.extension().is_some_and(|end| end == "kernel")).unwrap();
        std::fs::remove_file(kernel).unwrap();
        one_line(&[], &format!("{} there before", all - 1));
        run(&["kernels", "build", "--force", "--check"]).assert_refused("'--force' cannot be used with '--check'");
        let info = || run_in(&ahead, &cache, &["info"]);
        let listed = |count| format!("{ahead}: {count} compiled kernels (sm_80), 0 of other versions");
        assert!(info().stdout.contains(&listed(all)), "{:#?}", info());
        let whole = std::fs::read(kernel).unwrap();
        std::fs::write(kernel, &whole[..whole.len() - 1]).unwrap();
        let damaged = info();
        assert!(damaged.stdout.contains(&listed(all - 1)), "{damaged:#?}");
        assert_eq!(damaged.stderr.matches(kernel.to_str().unwrap()).count(), 1, "{damaged:#?}");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(&ahead, std::fs::Permissions::from_mode(0o777)).unwrap();
            assert!(info().stdout.contains("not used: ") && info().stdout.contains("everyone may write to it"));
            let refused = run_in("", &cache, &args);
            assert!(refused.code == 2 && refused.stderr.contains("kernels cannot be stored in"), "{refused:#?}");
        }
    }
}
